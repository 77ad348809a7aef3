"""`resume SWEEP`: continue a search, or extend a sweep, from the record in its folder."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.config.cluster import Slurm
from hpctrain.config.compose import Composer
from hpctrain.config.compose_program import ProgramComposer
from hpctrain.config.compose_sweep import SweepComposer, is_of_sweep, kinds_with
from hpctrain.config.multiple_values import TAKES_COMMAS, takes_as_list
from hpctrain.config.schema import SWEEP_GROUP
from hpctrain.config.sweep import KINDS
from hpctrain.errors import ERROR_PREFIX, ConfigError, ExitCode
from hpctrain.launch.existing_run import changed_config
from hpctrain.launch.prepare import plan
from hpctrain.launch.sbatch import require_sbatch
from hpctrain.phrases import counted, either
from hpctrain.results.run_result import comparable
from hpctrain.run.config_change import trained_varied
from hpctrain.run.directory import RunDirectory
from hpctrain.search.distribution import Choice, Distribution
from hpctrain.search.open_search import distributions_of
from hpctrain.search.record import SweepRecord
from hpctrain.search.values import in_order, values_of
from hpctrain.sweep.found_runs import SEARCH_KINDS, FoundRuns, find_runs
from hpctrain.sweep.recorded import deadline, record_of
from hpctrain.sweep.resume_search import resume_search
from hpctrain.sweep.runs import SweepRun, place
from hpctrain.sweep.sweep import Sweep, require_one_cluster

KEPT = "can't be changed: the existing runs were made with"
NEW_COMMAND = "type a new command with -m and another run_dir"
FIXED = ("seed", "min_steps", "reduction_factor")
"""Keys of a sweep with which its runs were drawn or compared; other values would mix two searches."""


@dataclasses.dataclass(frozen=True, slots=True)
class SweepResume:
    """What the user typed to resume a sweep.

    Attributes:
        home: the folder of the sweep.
        overrides: as typed.
        command: the whole command line, for the manifests.
        config_dir: of `--config-dir`; None for that of the sweep's command.
        force: continue runs although SLURM can't be asked whether their jobs are over.
        retry_failed: also train runs again that failed.
    """

    home: RunDirectory
    overrides: Sequence[str]
    command: Sequence[str]
    config_dir: str | None = None
    force: bool = False
    retry_failed: bool = False


def needs_record(record: SweepRecord, overrides: Sequence[str]) -> bool:
    """Whether a resume depends on how the sweep finds its runs, and not on the runs alone."""
    if record.deadline is not None or record.kind in SEARCH_KINDS:
        return True
    varied = _names(record)
    return any(
        is_of_sweep(override) or override.partition("=")[0].lstrip("+") in varied or _may_have_values(override)
        for override in overrides
    )


def _names(record: SweepRecord) -> frozenset[str]:
    """The keys that the sweep varies, without the plus signs of keys that only the sweep has."""
    return frozenset(name.lstrip("+") for name in record.space)


def resume_sweep(typed: SweepResume, record: SweepRecord) -> int:
    """Continue a sweep, with the runs that the overrides add to it.

    Args:
        typed: by the user.
        record: of the sweep.

    Returns:
        An `ExitCode`.

    Raises:
        ConfigError: an override is invalid, or would change runs that exist.
        RunDirectoryError: a run may be running, and SLURM can't be asked.
    """
    found = _found(typed, record)
    template = found.runs[0].config
    require_one_cluster([run.config for run in found.runs])
    if isinstance(template.cluster, Slurm):
        require_sbatch()
    sweep = Sweep(typed.home, typed.command, force=typed.force, record=found.record, retry_failed=typed.retry_failed)
    existing = [] if record.kind in SEARCH_KINDS else _existing(typed.home)
    # the runs of a grid that is only continued are all there
    is_known = record.kind == "optuna" or (record.kind == "grid" and record.space == found.record.space)
    added = [] if is_known else _added(typed.home, found)
    if record.kind not in SEARCH_KINDS:
        codes = sweep.launch([*existing, *added])
        return next((code for code in codes if code != ExitCode.FINISHED), ExitCode.FINISHED)
    sweep.print_warnings(added)
    with sweep.prepared(added, mode=template.mode):
        pass
    return resume_search(
        typed.home,
        found.record,
        plan(dataclasses.replace(template, run_dir=str(typed.home.path / "0"))),
        retry_failed=typed.retry_failed,
        force=typed.force,
    )


def _existing(home: RunDirectory) -> list[SweepRun]:
    """The runs of a sweep with their own configurations, which today's files may not give again."""
    numbers = sorted(int(path.name) for path in home.path.iterdir() if path.name.isdecimal())
    directories = [RunDirectory.at(home.path / str(number)) for number in numbers]
    runs = []
    for directory in directories:
        if directory.config.is_file():
            try:
                runs.append(SweepRun(changed_config(directory, (), None), trained_varied(directory)))
            except ConfigError as error:
                print(f"{ERROR_PREFIX}{os.path.relpath(directory.path)}: {error}; skipped", file=sys.stderr)
    return runs


def _added(home: RunDirectory, found: FoundRuns) -> list[SweepRun]:
    """The runs that the sweep doesn't have yet, placed."""
    if found.record.kind == "grid":
        placed = place(found.runs, home)
    else:  # run k is the k-th draw, whatever today's files would make of it
        places = [str(home.path / str(number)) for number in range(len(found.runs))]
        placed = [
            dataclasses.replace(run, config=dataclasses.replace(run.config, run_dir=folder))
            for run, folder in zip(found.runs, places, strict=True)
        ]
    return [run for run in placed if not run.directory.config.is_file()]


def _found(typed: SweepResume, record: SweepRecord) -> FoundRuns:
    """Compose the runs of the sweep, those that the overrides add included."""
    folder = Path(record.folder)
    config_dir = typed.config_dir or record.config_dir
    here = folder if folder.is_dir() else None
    if record.program is None:
        composer = Composer(config_dir, here)
    else:
        composer = ProgramComposer(list(record.program), config_dir, here)
    added = [override for override in typed.overrides if not is_of_sweep(override)]
    _refuse_changes(composer, record, added)
    _require_kind(record, typed.overrides)
    own = [f"sweep={record.kind}", *_options(record), *filter(is_of_sweep, typed.overrides)]
    search = SweepComposer(config_dir).compose_sweep(own)
    # a key that only the sweep has was typed with a plus sign, and may be named without it now
    typed_keys = {key.lstrip("+"): key for key in record.space}
    values = dict(record.space)
    for override in added:
        key, _, text = override.partition("=")
        (parsed_override,) = composer.parse([override])
        key = typed_keys.get(key.lstrip("+"), key)
        values[key] = text if parsed_override.is_sweep_override() else _as_values(composer, record, key, text)
    words = [*record.fixed, *(f"{key}={text}" for key, text in values.items())]
    with composer.explaining(words):
        parsed = composer.parse(words)
        wanted = record_of(composer, search, parsed, typed.command)
        wanted = dataclasses.replace(
            wanted,
            folder=record.folder,
            submitted=record.submitted,
            config_dir=record.config_dir,
            command=record.command,
            earlier=_earlier(record, wanted),
            deadline=deadline(wanted.time_limit_min, time.time()),
        )
        _require_growth(record, wanted)
        found_runs = find_runs(composer, wanted, parsed)
        if record.kind == "grid":
            wanted = dataclasses.replace(wanted, space=_merged(composer, record.space, wanted.space))
            found_runs = dataclasses.replace(found_runs, record=wanted)
        return found_runs


def _as_values(composer: Composer, record: SweepRecord, key: str, text: str) -> str:
    """Write one value as a list of values, as in a sweep's space."""
    if text == "null" and record.kind == "grid":  # which Hydra's choice(...) refuses
        return f"{_texts(composer, key, record.space[key])[0]},{text}"
    return f"choice({text or repr(text)})"


def _merged(composer: Composer, before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Merge the values that a grid has and those that it gets, so that new values are combined with all others."""
    merged = {**before, **after}
    for key in [key for key in before if before[key] != after[key]]:
        old, new = (_values(composer, key, space[key]) for space in (before, after))
        added = [text for value, text in new.items() if value not in old]
        merged[key] = ",".join([*_texts(composer, key, before[key]), *added]) if added else before[key]
    return merged


def _values(composer: Composer, key: str, text: str) -> dict[str, str]:
    """The texts of values, by a form that is the same for equal values."""
    texts = _texts(composer, key, text)
    return {
        comparable(override.value()): text
        for override, text in zip(composer.parse([f"{key}={text}" for text in texts]), texts, strict=True)
    }


def _texts(composer: Composer, key: str, text: str) -> list[str]:
    (override,) = composer.parse([f"{key}={text}"])
    return list(values_of(in_order(override)))


def _options(record: SweepRecord) -> list[str]:
    names = ("seed", "num_runs", "min_steps", "reduction_factor", "sampler", "startup_runs", "time_limit_min")
    return [f"sweep.{name}={value}" for name in names if (value := getattr(record, name)) is not None]


def _earlier(record: SweepRecord, wanted: SweepRecord) -> list[dict[str, object]]:
    """The spaces from which the runs that exist were drawn."""
    earlier = [dict(one) for one in record.earlier]
    if record.kind in ("random", "asha") and record.space != wanted.space:
        earlier.append({"space": dict(record.space), "num_runs": record.num_runs})
    return earlier


def _require_kind(record: SweepRecord, overrides: Sequence[str]) -> None:
    """Refuse another kind and its keys before they are composed: that error would advise to change the kind."""
    for override in filter(is_of_sweep, overrides):
        key, _, value = override.lstrip("+").partition("=")
        name = key.removeprefix(f"{SWEEP_GROUP}.")
        if key == SWEEP_GROUP and value != record.kind:
            raise ConfigError(key, value, f"{KEPT} sweep={record.kind}", NEW_COMMAND)
        if (owners := kinds_with(name)) and record.kind in KINDS and record.kind not in owners:
            problem = f"exists only with sweep={either(owners)}, and this is a sweep={record.kind}"
            raise ConfigError(key, value, problem, "leave it out")


def _require_growth(record: SweepRecord, wanted: SweepRecord) -> None:
    for name in FIXED:
        before, after = getattr(record, name), getattr(wanted, name)
        if before != after:
            raise ConfigError(f"sweep.{name}", after, f"{KEPT} sweep.{name}={before}", NEW_COMMAND)
    if record.kind == "grid" or record.num_runs is None or wanted.num_runs is None:
        return
    if wanted.num_runs < record.num_runs:
        problem = f"is less than the {counted(record.num_runs, 'run')} that the sweep already has"
        raise ConfigError("sweep.num_runs", wanted.num_runs, problem, "give the total number of runs")
    if record.kind == "optuna":
        _require_same_kinds(record, wanted)
    elif record.space != wanted.space and wanted.num_runs == record.num_runs:
        key = next(key for key, text in wanted.space.items() if record.space.get(key) != text)
        problem = f"is a new range, but all {record.num_runs} runs have been drawn"
        raise ConfigError(key, wanted.space[key], problem, f"add sweep.num_runs=N, with N above {record.num_runs}")


def _require_same_kinds(record: SweepRecord, wanted: SweepRecord) -> None:
    """Refuse what Optuna refuses for each further run: of what a key is drawn from, only bounds may change."""
    before, after = distributions_of(record), distributions_of(wanted)
    for key, distribution in after.items():
        if key in before and not _differs_in_bounds_alone(before[key], distribution):
            problem = f"can't continue {record.space[key]}: Optuna takes other bounds of an interval, and nothing else"
            raise ConfigError(key, wanted.space[key], problem, NEW_COMMAND)


def _differs_in_bounds_alone(one: Distribution, other: Distribution) -> bool:
    if isinstance(one, Choice) or isinstance(other, Choice):
        return one == other
    return type(one) is type(other) and one.log == other.log


def _refuse_changes(composer: Composer, record: SweepRecord, added: Sequence[str]) -> None:
    """Refuse single values of keys that the sweep doesn't vary, which the runs that exist don't have."""
    for override in composer.parse(added):
        key = override.get_key_element().lstrip("+")
        has_values = override.is_sweep_override() and not takes_as_list(override)
        if key in _names(record) or (has_values and record.kind == "grid"):
            continue
        if has_values:
            problem = "is not a key that the sweep draws"
            remedy = f"give a new range for {' or '.join(record.space)}, or {NEW_COMMAND}"
        else:
            problem = "would change the existing runs"
            remedy = f"name the runs to change (resume SWEEP/0 SWEEP/1 KEY=VALUE), or {NEW_COMMAND}"
        raise ConfigError(key, override.input_line.partition("=")[2] if override.input_line else "", problem, remedy)


def _may_have_values(override: str) -> bool:
    key, _, value = override.partition("=")
    if value[:1] in "[{'\"":
        return False
    if any(word in value for word in ("choice(", "range(", "interval(", "glob(")):
        return True
    key = key.lstrip("+")
    return "," in value and TAKES_COMMAS.fullmatch(key) is None

"""The runs of a sweep, composed: every combination of the values, or as many as are drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hydra.core.override_parser.types import IntervalSweep, Override

from hpctrain.config.compose import Composer
from hpctrain.config.compose_program import ProgramComposer
from hpctrain.config.multiple_values import value_as_typed
from hpctrain.config.root import Config
from hpctrain.config.run_config import RunConfig
from hpctrain.errors import ConfigError
from hpctrain.phrases import counted
from hpctrain.search.distribution import Choice, Distribution, distribution_of
from hpctrain.search.draw import Values, draws
from hpctrain.search.record import SweepRecord
from hpctrain.streams import print_warning
from hpctrain.sweep.expand import expand
from hpctrain.sweep.objective import require_metric
from hpctrain.sweep.progress import with_progress
from hpctrain.sweep.runs import SweepRun
from hpctrain.sweep.sweep_run import sweep_run

SEARCH_KINDS = ("asha", "optuna")
"""Kinds of sweeps that are searches: their array tasks ask for their runs."""
PAUSE = "trainer.pause_at_step"
EXAMPLE = "give a key several values, such as 'optimizer.lr=tag(log,interval(1e-5,1e-1))'"


@dataclasses.dataclass(frozen=True, slots=True)
class FoundRuns:
    """What a command asks for.

    Attributes:
        record: of the sweep, with what the configuration of the runs decides.
        runs: checked; for optuna, which knows none yet, samples of the space.
    """

    record: SweepRecord
    runs: Sequence[SweepRun]


def find_runs(composer: Composer, record: SweepRecord, parsed: Sequence[Override]) -> FoundRuns:
    """Compose and check the runs of a sweep.

    Args:
        composer: of the command line's folders.
        record: of the sweep.
        parsed: all overrides but those of the sweep.

    Raises:
        ConfigError: a run is invalid, or the space can't be searched in this way.
    """
    fixed_keys = [override.get_key_element() for override in parsed if not override.is_sweep_override()]
    if record.kind == "grid":
        jobs = expand(parsed)
        return FoundRuns(record, [sweep_run(composer, job, fixed_keys) for job in with_progress(jobs, "composed")])
    last = {override.get_key_element(): override for override in parsed}
    _refuse(composer, record, list(last.values()))
    (fixed,) = expand([override for override in last.values() if not override.is_sweep_override()])
    space = {key: distribution_of(override) for key, override in last.items() if override.is_sweep_override()}
    for key, override in last.items():
        if isinstance(override.value(), IntervalSweep) and space[key].size == 2:
            low, high = space[key].all()
            problem = f"{key}={value_as_typed(override)} draws {low} or {high}"
            print_warning(f"{problem}; for the numbers between them, write interval({low}.0,{high}.0)")
    if record.kind == "optuna":
        samples = [sweep_run(composer, [*fixed, *values], fixed_keys) for values in _samples(space)]
        _refuse_config(record.kind, samples[0].config)
        return FoundRuns(record, samples)
    drawn = _drawn(composer, record, space)
    asked, record = record.num_runs or 0, dataclasses.replace(record, num_runs=len(drawn))
    jobs = [[*fixed, *(f"{key}={value}" for key, value in values)] for values in drawn]
    if record.kind == "asha":
        first = sweep_run(composer, jobs[0], fixed_keys).config
        _refuse_config(record.kind, first)
        record = dataclasses.replace(record, min_steps=_min_steps(record, first, space))
        jobs = [[*job, f"{PAUSE}={record.min_steps}"] for job in jobs]
        fixed_keys.append(PAUSE)
    runs = [sweep_run(composer, job, fixed_keys) for job in with_progress(jobs, "composed")]
    if len(runs) < asked:
        count = counted(len(runs), "combination")
        print_warning(f"the listed values have only {count}: {counted(len(runs), 'run')}, not sweep.num_runs={asked}")
    return FoundRuns(record, runs)


def _drawn(composer: Composer, record: SweepRecord, space: Mapping[str, Distribution]) -> list[Values]:
    """Draw the values of all runs: those of the first ones from earlier spaces."""
    found: list[Values] = []
    for earlier in record.earlier:
        parsed = composer.parse([f"{key}={text}" for key, text in earlier["space"].items()])
        before = {override.get_key_element(): distribution_of(override) for override in parsed}
        missing = earlier["num_runs"] - len(found)
        found += draws(before, record.seed or 0, missing, taken=found, first=len(found))
    missing = (record.num_runs or 0) - len(found)
    return found + draws(space, record.seed or 0, missing, taken=found, first=len(found))


def _samples(space: Mapping[str, Distribution]) -> list[list[str]]:
    """The ends of each interval and each of a choice's values, so that a mistake shows before anything is submitted."""
    middle = {key: each.at(0.5) for key, each in space.items()}
    return [
        [f"{name}={text}" for name, text in (middle | {key: value}).items()]
        for key, each in space.items()
        for value in (each.values if isinstance(each, Choice) else (each.at(0.0), each.at(1 - 1e-12)))
    ]


def _min_steps(record: SweepRecord, config: RunConfig, space: Mapping[str, Distribution]) -> int:
    assert isinstance(config, Config)  # `_refuse` refuses programs
    steps = record.min_steps or config.trainer.eval_every_steps
    if steps is None or (record.min_steps is None and "trainer.eval_every_steps" in space):
        problem = "is required: the runs have no common trainer.eval_every_steps to use as the first rung"
        raise ConfigError("sweep.min_steps", None, problem, "set it to the first step at which runs may pause")
    if config.trainer.max_steps is not None and steps >= config.trainer.max_steps:
        problem = f"is not below trainer.max_steps={config.trainer.max_steps}, so no run would pause"
        raise ConfigError("sweep.min_steps", steps, problem, "lower it, or use sweep=random")
    return steps


def _refuse(composer: Composer, record: SweepRecord, overrides: Sequence[Override]) -> None:
    """Refuse spaces that a search of this kind can't have."""
    swept = [override for override in overrides if override.is_sweep_override()]
    if not swept:
        raise ConfigError("sweep", record.kind, "there is nothing to search: every key has one value", EXAMPLE)
    if record.kind not in SEARCH_KINDS:
        return
    if isinstance(composer, ProgramComposer):
        problem = "pauses or ranks runs by their evaluations, which programs don't have"
        raise ConfigError("sweep", record.kind, problem, "use sweep=random")
    for override in swept:
        key = override.key_or_group
        if key == "nodes" or key.partition(".")[0] == "cluster":
            problem = f"changes what the jobs request from SLURM, but all tasks of sweep={record.kind} request the same"
            raise ConfigError(key, value_as_typed(override), problem, "give it one value, or use sweep=random")
    if record.kind == "optuna":
        _require_optuna()


def _refuse_config(kind: str, config: RunConfig) -> None:
    """Refuse a configuration whose runs a search of this kind can't train or rank."""
    assert isinstance(config, Config)  # `_refuse` refuses programs
    if config.after:
        problem = f"can't delay the tasks of sweep={kind}, which take one run after another"
        raise ConfigError("after", ",".join(config.after), problem, "use sweep=random, or submit it later")
    if config.cluster.wait:
        remedy = "leave it out; `python -m hpctrain status --watch` shows how far the search is"
        raise ConfigError("cluster.wait", True, "can't wait for a search, whose runs begin one by one", remedy)
    if kind == "asha" and config.trainer.pause_at_step is not None:
        problem = "conflicts with sweep=asha, which decides where each run pauses"
        raise ConfigError(PAUSE, config.trainer.pause_at_step, problem, "leave it out, and set sweep.min_steps")
    require_metric(kind, config)


def _require_optuna() -> None:
    import importlib.util

    # found, not imported: the batch script imports it
    if importlib.util.find_spec("optuna") is None:
        problem = "needs the package optuna, which isn't installed"
        raise ConfigError("sweep", "optuna", problem, 'pip install "hpctrain[optuna]"')

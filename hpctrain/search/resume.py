"""`resume SWEEP`: continue a search, or extend a sweep, from the record in its folder."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hpctrain.config.cluster import Slurm
from hpctrain.config.compose import Composer, ProgramComposer, SweepComposer, is_of_sweep, kinds_with
from hpctrain.config.overrides import TAKES_COMMAS, takes_as_list
from hpctrain.config.root import SWEEP_GROUP
from hpctrain.config.sweep import KINDS
from hpctrain.errors import ERROR_PREFIX, ConfigError, ExitCode, RunDirectoryError
from hpctrain.launch.existing_run import changed_config
from hpctrain.launch.prepare import RunPlan
from hpctrain.launch.sbatch import require_sbatch
from hpctrain.phrases import counted, either, listed
from hpctrain.results.run_result import comparable
from hpctrain.run.config_change import trained_varied
from hpctrain.run.directory import RunDirectory
from hpctrain.run.launcher import CLOCK_SLACK_S
from hpctrain.run.process import process_start
from hpctrain.run.reason import Reason
from hpctrain.run.sweep_record import SWEEP_KEYS, SweepRecord
from hpctrain.search.algorithm import NEW_COMMAND, Algorithm, ComposedSweep
from hpctrain.search.distribution import in_order, values_of
from hpctrain.search.journal import SearchDecision, SearchState
from hpctrain.search.multirun import record_of
from hpctrain.search.runs import SweepRun, runs_in
from hpctrain.search.search import Search, algorithm_of, is_search, train_search_here
from hpctrain.search.sweep import Sweep, require_one_cluster, submit_tasks, template_of
from hpctrain.status.before_launch import statuses_before_launch
from hpctrain.status.jobs import job_ids, query_jobs

KEPT = "can't be changed: the existing runs were made with"
FIXED = ("seed", "min_steps", "reduction_factor")
"""Keys of a sweep with which its runs were drawn or compared; other values would mix two searches."""
FAILURES = frozenset(reason for reason in Reason if reason.meaning.exit_code is ExitCode.FAILED)
"""Reasons with which a run has failed."""


@dataclasses.dataclass(frozen=True, slots=True)
class SweepResume:
    """The resume of a sweep, as the user typed it.

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
    if record.deadline is not None or is_search(record):
        return True
    varied = _names(record)
    keys = {override.partition("=")[0].lstrip("+") for override in overrides}
    return bool(keys & varied) or any(is_of_sweep(override) or _may_have_values(override) for override in overrides)


def _names(record: SweepRecord) -> frozenset[str]:
    """The keys that the sweep varies, without the plus signs of keys that only the sweep has."""
    return frozenset(name.lstrip("+") for name in record.space)


def resume_sweep(request: SweepResume, record: SweepRecord) -> int:
    """Continue a sweep, with the runs that the overrides add to it.

    Args:
        request: by the user.
        record: of the sweep.

    Returns:
        An `ExitCode`.

    Raises:
        ConfigError: an override is invalid, or would change runs that exist.
        RunDirectoryError: a run may be running, and SLURM can't be asked.
    """
    algorithm = algorithm_of(record)
    composed = _compose_sweep(request, algorithm)
    first = composed.runs[0]
    require_one_cluster([run.config for run in composed.runs])
    if isinstance(first.config.cluster, Slurm):
        require_sbatch()
    home = request.home
    sweep = Sweep(home, request.command, force=request.force, record=composed.record, retry_failed=request.retry_failed)
    added = algorithm.added_runs(home, composed)
    if not is_search(record):
        codes = sweep.launch([*_existing_runs(home), *added])
        return next((code for code in codes if code != ExitCode.FINISHED), ExitCode.FINISHED)
    sweep.print_warnings(added)
    with sweep.prepared(added, mode=first.config.mode):
        pass
    return resume_search(request, composed.record, template_of(first, home))


def _existing_runs(home: RunDirectory) -> list[SweepRun]:
    """The runs of a sweep with their own configurations, which today's files may not give again."""
    runs = []
    for directory in runs_in(home).values():
        if directory.config.is_file():
            try:
                runs.append(SweepRun(changed_config(directory, (), None), trained_varied(directory)))
            except ConfigError as error:
                print(f"{ERROR_PREFIX}{os.path.relpath(directory.path)}: {error}; skipped", file=sys.stderr)
    return runs


def _compose_sweep(request: SweepResume, algorithm: Algorithm) -> ComposedSweep:
    """Compose the runs of the sweep, those that the overrides add included."""
    record = algorithm.record
    folder = Path(record.folder)
    config_dir = request.config_dir or record.config_dir
    here = folder if folder.is_dir() else None
    if record.program is None:
        composer = Composer(config_dir, here)
    else:
        composer = ProgramComposer(list(record.program), config_dir, here)
    added = [override for override in request.overrides if not is_of_sweep(override)]
    _refuse_changes(composer, record, added)
    _require_kind(record, request.overrides)
    sweep_overrides = [f"sweep={record.kind}", *_options(record), *filter(is_of_sweep, request.overrides)]
    search = SweepComposer(config_dir).compose_sweep(sweep_overrides)
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
        new_record = record_of(composer, search, parsed, record.command)
        unchanged_fields = {name: getattr(record, name) for name in ("folder", "submitted", "config_dir")}
        new_record = dataclasses.replace(new_record, earlier=algorithm.earlier_spaces(new_record), **unchanged_fields)
        for name in FIXED:
            before, after = getattr(record, name), getattr(new_record, name)
            if before != after:
                raise ConfigError(f"sweep.{name}", after, f"{KEPT} sweep.{name}={before}", NEW_COMMAND)
        algorithm.require_extension(new_record)
        composed = algorithm_of(new_record).compose(composer, parsed)
        if record.kind == "grid":
            new_record = dataclasses.replace(new_record, space=_merged(composer, record.space, new_record.space))
            composed = dataclasses.replace(composed, record=new_record)
        return composed


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
    return [
        f"sweep.{name}={value}"
        for name in (*SWEEP_KEYS, "time_limit_min")
        if (value := getattr(record, name)) is not None
    ]


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
    has_values = "," in value and TAKES_COMMAS.fullmatch(key.lstrip("+")) is None
    return has_values or any(word in value for word in ("choice(", "range(", "interval(", "glob("))


def resume_search(request: SweepResume, record: SweepRecord, template: RunPlan) -> int:
    """Continue a search: release what its tasks left, and submit tasks for that and for what was added.

    Args:
        request: by the user.
        record: of the sweep, as it is stored.
        template: any run of the search, from which the request to SLURM is read.

    Returns:
        An `ExitCode`.

    Raises:
        RunDirectoryError: a run may be running, and SLURM can't be asked.
    """
    home = request.home
    search = Search(home, record)
    search.create()
    state = search.state()
    live = [*_live_tasks(home, force=request.force), *_live_processes(home, state, force=request.force)]
    failed = [end for end in state.ends.values() if end.reason in FAILURES]
    cancelled = [end for end in state.ends.values() if end.reason == Reason.CANCELLED]
    lost = _lost_assignments(search, state, live, force=request.force)
    search.release([*lost, *cancelled, *(failed if request.retry_failed else ())])
    failed_runs = [] if request.retry_failed else sorted({end.run for end in failed})
    if failed_runs:
        names = listed([os.path.relpath(search.directory(run).path) for run in failed_runs])
        resume = f"python -m hpctrain resume {home.as_typed} --retry-failed"
        print(f"{counted(len(failed_runs), 'run')} failed ({names}); to train them again: {resume}")
    if live:
        print(f"{counted(len(live), 'task')} of the search queued or running: left alone")
    if num_tasks := _num_tasks(search, live):
        is_slurm = isinstance(template.config.cluster, Slurm)
        return submit_tasks(home, template, num_tasks) if is_slurm else train_search_here(home)
    if failed_runs and not live:
        print("nothing else is left of the search")
        return ExitCode.FAILED
    print("nothing is left to begin" if live else "the search is complete")
    return ExitCode.FINISHED


def _num_tasks(search: Search, live: Collection[str]) -> int:
    """The number of tasks to submit: 0 if nothing is left, or if the tasks that wait or run will do it."""
    state = search.state()
    # a task that waits in the queue begins one new run; one that runs has begun its own
    waiting = sum(task not in {assignment.task for assignment in state.first.values()} for task in live)
    new = max(0, sum(1 for _ in search.algorithm.new_runs(state)) - waiting)
    promoted = 0 if live else len(search.algorithm.next_rungs(state))
    return new + len(state.released) or promoted


def _lost_assignments(
    search: Search, state: SearchState, live: Collection[str], *, force: bool
) -> list[SearchDecision]:
    """The decisions that gave runs to tasks which are gone."""
    assignments = [assignment for assignment in state.active.values() if assignment.task not in live]
    statuses = statuses_before_launch([search.directory(assignment.run) for assignment in assignments], force=force)
    return [assignment for assignment, status in zip(assignments, statuses, strict=True) if not status.state.may_change]


def _live_processes(home: RunDirectory, state: SearchState, *, force: bool) -> list[str]:
    """The processes that were given a run without a job, and still work for the search."""
    live = []
    for assignment in state.active.values():
        host, colon, pid = assignment.task.rpartition(":")
        if colon and host == socket.gethostname():
            started = process_start(int(pid)) if pid.isdecimal() else None
            if started is not None and started <= assignment.time + CLOCK_SLACK_S:
                live.append(assignment.task)
        elif colon and not force:
            raise _may_run(home, f"process {pid} on {host} may still train run {assignment.run}; run this there")
    return live


def _live_tasks(home: RunDirectory, *, force: bool) -> list[str]:
    """The array tasks of the search that wait or run."""
    ids = job_ids(home)
    jobs = query_jobs(ids)
    if jobs is None and ids and not force:
        where = "run this where squeue works"
        raise _may_run(home, f"its tasks may still be queued or running, and SLURM can't be asked; {where}")
    return [job_id for job_id in ids if (job := (jobs or {}).get(job_id)) is not None and not job.state.is_finished]


def _may_run(home: RunDirectory, problem: str) -> RunDirectoryError:
    insist = f"`python -m hpctrain resume {home.as_typed} --force`"
    return RunDirectoryError(f"{home.path}: {problem}, or insist: {insist}")

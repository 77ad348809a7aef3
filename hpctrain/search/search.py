"""A search: the run that each of its tasks trains next, and the work of a task. The tasks share the journal.

Why it is like this: docs/adr/0021-searches-without-a-server.md.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from hpctrain.config.checkpoint import EVAL_PREFIX
from hpctrain.config.compose import Composer
from hpctrain.config.sweep import SEARCHES
from hpctrain.errors import ERROR_PREFIX, ConfigError, ExitCode, RunDirectoryError
from hpctrain.launch.existing_run import changed_config
from hpctrain.launch.launch_code import LaunchCode
from hpctrain.launch.launcher import launch_here
from hpctrain.launch.prepare import RunPlan, prepare
from hpctrain.phrases import either
from hpctrain.retry import retry
from hpctrain.run.checkpoints import saved_step
from hpctrain.run.code import CodeSnapshot, current_code
from hpctrain.run.config_change import trained_varied
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import read_evaluation
from hpctrain.run.ledger import Ledger
from hpctrain.run.manifest import manifest, varied_text
from hpctrain.run.reason import Reason
from hpctrain.run.sweep_record import REMEDY, SweepRecord
from hpctrain.search.algorithm import PAUSE, Algorithm, Asha, Grid, Random, SearchAlgorithm
from hpctrain.search.journal import FOLDER, Journal, JournalEvent, SearchDecision, SearchState
from hpctrain.search.optuna_study import OptunaStudy
from hpctrain.search.runs import SweepRun

P = ParamSpec("P")
T = TypeVar("T")

STORAGE_S = 60.0
"""Seconds to retry I/O in the sweep's folder while its file system is unavailable."""


ALGORITHMS: Mapping[str, type[Algorithm]] = {"grid": Grid, "random": Random, "asha": Asha, "optuna": OptunaStudy}
"""How the kinds of sweeps find their runs, by the option of ``conf/sweep``."""


def algorithm_of(record: SweepRecord) -> Algorithm:
    """Return how a sweep finds its runs, by its record.

    Raises:
        RunDirectoryError: its kind is unknown to this version of hpctrain.
    """
    if record.kind not in ALGORITHMS:
        kinds = either([*ALGORITHMS])
        raise RunDirectoryError(f"sweep.json: expected kind to be {kinds}, found {record.kind!r}; {REMEDY}")
    return ALGORITHMS[record.kind](record)


def is_search(record: SweepRecord) -> bool:
    """Whether the tasks of a sweep ask for their runs."""
    return record.kind in SEARCHES


class Search:
    """A search, of which each task asks for a run; tasks communicate only through the journal.

    Args:
        home: the folder of the sweep.
        record: of a sweep whose tasks ask for their runs.
        clock: epoch seconds.

    Attributes:
        algorithm: what to train next.
    """

    def __init__(self, home: RunDirectory, record: SweepRecord, *, clock: Callable[[], float] = time.time) -> None:
        algorithm = algorithm_of(record)
        assert isinstance(algorithm, SearchAlgorithm)
        self.home = home
        self.algorithm = algorithm
        self._clock = clock
        self._journal = Journal(home)

    def directory(self, run: int) -> RunDirectory:
        """The directory of a run."""
        return RunDirectory.at(self.home.path / str(run))

    def state(self) -> SearchState:
        """Read the journal, and record the ends of runs that their own records show.

        No task needs a heartbeat: whichever asks first records what the ledgers know and the journal doesn't.

        Raises:
            OSError: the file system's error.
        """
        self._journal.read()
        while True:
            ends = (self._end(assignment) for assignment in self._journal.state.active.values())
            end = next((end for end in ends if end is not None), None)
            if end is not None:
                self._journal.publish(end)
            # the records of a run whose end another task has published meanwhile may be those of its next rung
            if not self._journal.read() and end is None:
                return self._journal.state

    def ask(self, task: str, *, max_new_runs: int | None = 1) -> SearchDecision | None:
        """Return the begin of the run that a task is to train next; None if nothing is left for it.

        It also has what the sampler drew when the run was begun for the first time.

        The order is: the run that the task was given before, runs whose task is gone, runs that may pass another rung,
        and a new run. Runs that were killed, or crashed, before they recorded their end come last, since another crash
        may end this task as well.

        Args:
            task: its id, the same after a requeue.
            max_new_runs: new runs that the task may begin, its earlier ones included; None for no limit.

        Raises:
            OSError: the file system's error.
        """
        while True:
            state = self.state()
            unfinished = next((assignment for assignment in state.active.values() if assignment.task == task), None)
            assignment = unfinished or self._next(state, task, max_new_runs)
            if assignment is None:
                return None
            if unfinished is not None or self._journal.publish(assignment):
                return replace(assignment, drawn=state.first.get(assignment.run, assignment).drawn)

    def release(self, decisions: Iterable[SearchDecision]) -> None:
        """Let any task continue runs whose own task is gone, or that failed or were cancelled.

        Args:
            decisions: the newest ones on these runs, a begin or an end each. A run on which another one follows
                meanwhile is left alone.

        Raises:
            OSError: the file system's error.
        """
        for decision in decisions:
            run, rung = decision.run, decision.rung
            release = SearchDecision(event=JournalEvent.RELEASE, run=run, rung=rung, time=self._clock())
            while self._newest(run, rung) == decision and not self._journal.publish(release):
                pass

    def fail(self, run: int, rung: int) -> None:
        """Record that a run can't be trained.

        Raises:
            OSError: the file system's error.
        """
        end = SearchDecision(event=JournalEvent.END, run=run, rung=rung, time=self._clock(), reason=Reason.FAILED.value)
        while run in self.state().active and not self._journal.publish(end):
            pass

    def create(self) -> None:
        """Make the journal's folder, with the permissions of the sweep's."""
        with self.home.permissions():
            (self.home.path / FOLDER).mkdir(exist_ok=True)

    def _next(self, state: SearchState, task: str, max_new_runs: int | None) -> SearchDecision | None:
        released = sorted((self._num_unrecorded_ends(run), run, rung) for run, rung in state.released.items())
        if released and not released[0][0]:
            return self._begin(*released[0][1:], task)
        deadline = self.algorithm.record.deadline
        if deadline is None or self._clock() <= deadline:
            if promoted := self.algorithm.next_rungs(state):
                return self._begin(*promoted[0], task)
            begun = sum(assignment.task == task for assignment in state.first.values())
            may_begin = max_new_runs is None or begun < max_new_runs
            if may_begin and (new := next(self.algorithm.new_runs(state), None)) is not None:
                return self._begin(new, 0, task, self.algorithm.draw(state))
        return self._begin(*released[0][1:], task) if released else None

    def _num_unrecorded_ends(self, run: int) -> int:
        with contextlib.suppress(RunDirectoryError):  # one damaged run must not stop the others
            return Ledger(self.directory(run)).num_unrecorded_ends()
        return 0

    def _begin(self, run: int, rung: int, task: str, drawn: Mapping[str, Any] | None = None) -> SearchDecision:
        return SearchDecision(
            event=JournalEvent.BEGIN,
            run=run,
            rung=rung,
            time=self._clock(),
            task=task,
            claims_before=Ledger(self.directory(run)).last_claim(),
            drawn=drawn or {},
        )

    def _newest(self, run: int, rung: int) -> SearchDecision | None:
        """The decision that holds for a run: its begin, or its end at this rung; None once it is released."""
        state = self.state()
        return state.active.get(run) or (None if run in state.released else state.ends.get((run, rung)))

    def _end(self, assignment: SearchDecision) -> SearchDecision | None:
        """Return the end of what was given to a task; None while it may continue by itself."""
        directory = self.directory(assignment.run)
        ledger = Ledger(directory)
        try:
            attempts = ledger.attempts()
            last_claim = ledger.last_claim()
        except RunDirectoryError:  # one damaged run must not stop the others
            return None
        last = next((attempt for attempt in reversed(attempts) if attempt.attempt > assignment.claims_before), None)
        if last is None or last.reason is None or last.attempt < last_claim:
            return None
        reason = last.reason
        if last.continues or (reason.meaning.resumable and reason is not Reason.PAUSED):
            return None
        evaluation = directory.newest(read_evaluation) if reason in (Reason.PAUSED, Reason.COMPLETED) else None
        score = None if evaluation is None else evaluation.best
        value: float | None = None
        if evaluation is not None and score is not None:
            is_best = self.algorithm.counts_best_value
            value = score.value if is_best else evaluation.means.get(f"{EVAL_PREFIX}{score.name}")
        return SearchDecision(
            event=JournalEvent.END,
            run=assignment.run,
            rung=assignment.rung,
            step=last.end_step or 0,
            reason=reason.value,
            value=value,
            metric="" if score is None else score.name,
            mode="" if score is None else score.mode,
        )


def train_assigned(
    home: RunDirectory, task: str, train: Callable[[RunPlan], tuple[int, bool]], *, max_new_runs: int | None
) -> int:
    """Train what a search gives to one of its tasks, until nothing is left.

    Args:
        home: the folder of the sweep.
        task: its id, the same after a requeue.
        train: trains a run; returns an `ExitCode`, and whether the task has to end at once.
        max_new_runs: new runs that the task may begin; None for no limit.

    Returns:
        An `ExitCode`: 0 if all runs paused or completed, else that of the first one that didn't.

    Raises:
        HpctrainError: a run can't be prepared.
        OSError: the sweep's folder stayed unavailable.
    """
    search = Search(home, _record(home))
    search.create()
    codes: list[int] = []
    while True:
        search = _retry(_with_current_record, search)
        assignment = _retry(search.ask, task, max_new_runs=max_new_runs)
        if assignment is None:
            return next(iter(codes), ExitCode.FINISHED)
        code: int = ExitCode.FAILED
        ends_at_once = False
        try:
            plan = _retry(plan_begun_run, search, assignment)
        except ConfigError as error:
            print(f"{ERROR_PREFIX}run {assignment.run}: {error}", file=sys.stderr, flush=True)
            _retry(search.fail, assignment.run, assignment.rung)
        else:
            print(_heading(search, assignment, plan), flush=True)
            code, ends_at_once = train(plan)
        if code not in (ExitCode.FINISHED, ExitCode.INTERRUPTED):
            codes.append(code)
        if ends_at_once:
            return code
        state = _retry(search.state)
        active = state.active.get(assignment.run)
        if active is not None and active.task == task:
            # neither paused nor ended: it is left to `resume`
            return code or ExitCode.INTERRUPTED
        if (passed := state.ends.get((assignment.run, assignment.rung))) is not None:
            print(_describe_end(passed), flush=True)


def _retry(act: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    call = functools.partial(act, *arguments, **options)
    return retry(call, on=OSError, for_s=STORAGE_S, problem="the sweep's folder can't be used yet")


def _with_current_record(search: Search) -> Search:
    record = _record(search.home)
    # a resume may have extended the search meanwhile
    return search if record == search.algorithm.record else Search(search.home, record)


def _record(home: RunDirectory) -> SweepRecord:
    record = SweepRecord.read(home)
    if record is None:
        raise RunDirectoryError(f"{home.path}: expected the folder of a sweep, but it has no sweep.json")
    return record


def train_search_here(home: RunDirectory) -> int:
    """Train the runs of a search on this machine, one after another; return an `ExitCode`.

    Args:
        home: the folder of the sweep.

    Raises:
        HpctrainError: a run can't be prepared.
    """
    stop_file = home.sweep_stop_file

    def train(plan: RunPlan) -> tuple[int, bool]:
        if stop_file.exists():
            return ExitCode.CANCELLED, True
        # advice on one run would mislead: the search continues it, at once or when it is resumed
        code = launch_here(plan, quiet=[Reason.PAUSED, Reason.INTERRUPTED])
        if stop_file.exists():
            return ExitCode.CANCELLED, True
        return code, is_stopped(plan.directory, code)

    task = f"{socket.gethostname()}:{os.getpid()}"
    code = train_assigned(home, task, train, max_new_runs=None)
    if code in (ExitCode.INTERRUPTED, ExitCode.CANCELLED):
        print(f"stopped; to resume: python -m hpctrain resume {home.as_typed}", file=sys.stderr)
    return code


def is_stopped(run: RunDirectory, code: int) -> bool:
    """Whether Ctrl-C ended a run here, which is meant for its whole sweep: a pause has the same exit code."""
    if code != ExitCode.INTERRUPTED:
        return False
    attempts = Ledger(run).attempts()
    return not (attempts and attempts[-1].reason is Reason.PAUSED)


def plan_begun_run(search: Search, assignment: SearchDecision) -> RunPlan:
    """Make the directory of a run, if it has none, and store until which step it is to be trained.

    Raises:
        ConfigError: the values that were drawn don't fit together.
        RunDirectoryError: the directory can't be written.
    """
    directory, record = search.directory(assignment.run), search.algorithm.record
    if not directory.config.is_file():
        if search.algorithm.knows_runs:
            raise RunDirectoryError(f"{directory.path}: its config.yaml is gone; restore it, or remove the folder")
        # the task that began to make it was killed: the journal gave the number to this task alone
        shutil.rmtree(directory.path, ignore_errors=True)
        run = drawn_run(search.home, record, assignment.drawn)
        return prepare(
            run.at(directory.path).config,
            record.command,
            run.varied,
            manifest(record.command, Path(record.folder)),
            report=lambda _line: None,
            code=LaunchCode(search.home),
        )
    # no line on the changed key: all that changes is the step of the pause, which the search decides
    pause = search.algorithm.pause_at_step(assignment.rung)
    changes = [] if pause is None else [f"{PAUSE}={pause}"]
    return prepare(changed_config(directory, changes, None), record.command, report=lambda _line: None)


def drawn_run(home: RunDirectory, record: SweepRecord, drawn: Mapping[str, Any]) -> SweepRun:
    """Compose a run from what was drawn for it, with the configuration files that were submitted.

    Raises:
        ConfigError: the values don't fit together.
        RunDirectoryError: files of the copied code are missing.
    """
    code = current_code(home)
    if code is not None and (damage := code.find_damage(contents=False)):
        raise RunDirectoryError(damage)
    folder = Path(record.folder) if code is None else code.working_directory
    composer = Composer(_copied_folder(code, record.config_dir), folder)
    fixed = [override.partition("=")[0] for override in record.fixed]
    # a key that doesn't exist without the sweep was typed with a plus sign
    typed_keys = {key.lstrip("+"): key for key in record.space}
    values = {typed_keys.get(key, key): value for key, value in drawn.get("params", {}).items()}
    overrides = [f"{key}={repr(value) if isinstance(value, float) else value}" for key, value in values.items()]
    return SweepRun.compose(composer, [*record.fixed, *overrides], fixed)


def _copied_folder(code: CodeSnapshot | None, folder: str | None) -> str | None:
    """Return the copy of a folder; the folder itself if it wasn't copied."""
    if code is None or folder is None:
        return folder
    place = os.path.relpath(folder, code.root)
    copied = code.folder / place
    return str(copied) if not place.startswith("..") and copied.is_dir() else folder


def _heading(search: Search, assignment: SearchDecision, plan: RunPlan) -> str:
    """Say which run begins or continues, and to which step."""
    verb = "begins" if saved_step(plan.directory) == 0 else "continues"
    pause = search.algorithm.pause_at_step(assignment.rung)
    last = plan.training.trainer.max_steps
    until = "its end" if pause is None or (last is not None and last <= pause) else f"step {pause}"
    return f"run {assignment.run} {verb}, to {until}: {varied_text(trained_varied(plan.directory))}".rstrip(": ")


def _describe_end(end: SearchDecision) -> str:
    """Say how a run ended, and with which value the search compares it."""
    value = "" if end.value is None else f": {EVAL_PREFIX}{end.metric} {end.value:.4g}"
    return f"run {end.run} {end.reason} at step {end.step}{value}"

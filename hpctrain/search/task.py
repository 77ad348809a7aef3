"""One task of a search: it asks for a run, prepares and trains it, and asks again."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hpctrain.config.checkpoint import EVAL_PREFIX
from hpctrain.config.compose import Composer
from hpctrain.errors import ERROR_PREFIX, ConfigError, ExitCode, RunDirectoryError
from hpctrain.launch.existing_run import changed_config
from hpctrain.launch.launch_code import LaunchCode
from hpctrain.launch.launcher import launch_here
from hpctrain.launch.prepare import RunPlan, prepare
from hpctrain.retry import retry
from hpctrain.run.checkpoints import saved_step
from hpctrain.run.code import CodeSnapshot, current_code
from hpctrain.run.config_change import trained_varied
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.run.manifest import manifest, varied_text
from hpctrain.run.reason import Reason
from hpctrain.run.sweep_record import SweepRecord
from hpctrain.search.algorithm import PAUSE
from hpctrain.search.journal import Decision
from hpctrain.search.runs import SweepRun
from hpctrain.search.search import Assignment, Search, algorithm_of

T = TypeVar("T")

STORAGE_S = 60.0
"""Seconds to retry I/O in the sweep's folder while its file system is unavailable."""


class SearchTask:
    """One task of a search.

    Args:
        home: the folder of the sweep.
        task: its id, the same after a requeue.
        train: trains a run; returns an `ExitCode`, and whether the task has to end at once.
        max_new_runs: new runs that the task may begin; None for no limit.
    """

    def __init__(
        self, home: RunDirectory, task: str, train: Callable[[RunPlan], tuple[int, bool]], *, max_new_runs: int | None
    ) -> None:
        self.record = _record(home)
        self.search = Search(home, self.record)
        self.search.create()
        self._home = home
        self._task = task
        self._train = train
        self._max_new_runs = max_new_runs

    def work(self) -> int:
        """Train what the search gives to this task, until nothing is left.

        Returns:
            An `ExitCode`: 0 if all runs paused or completed, else that of the first one that didn't.

        Raises:
            HpctrainError: a run can't be prepared.
            OSError: the sweep's folder stayed unavailable.
        """
        codes: list[int] = []
        while (assignment := self._retry(self._ask)) is not None:
            code, ends_at_once = self._train_one(assignment)
            if code not in (ExitCode.FINISHED, ExitCode.INTERRUPTED):
                codes.append(code)
            if ends_at_once:
                return code
            state = self._retry(self.search.state)
            if assignment.run in state.given:
                # neither paused nor ended: it is left to `resume`
                return code or ExitCode.INTERRUPTED
            if (passed := state.ends.get((assignment.run, assignment.rung))) is not None:
                print(_result(passed), flush=True)
        return next(iter(codes), ExitCode.FINISHED)

    def _ask(self) -> Assignment | None:
        if (record := _record(self._home)) != self.record:  # a resume has extended the search meanwhile
            self.record = record
            self.search = Search(self._home, record)
        return self.search.ask(self._task, max_new_runs=self._max_new_runs)

    def _train_one(self, assignment: Assignment) -> tuple[int, bool]:
        try:
            plan = self._retry(lambda: plan_assigned(self._home, self.record, assignment))
        except ConfigError as error:
            print(f"{ERROR_PREFIX}run {assignment.run}: {error}", file=sys.stderr, flush=True)
            self._retry(lambda: self.search.fail(assignment.run, assignment.rung))
            return ExitCode.FAILED, False
        print(_heading(assignment, plan), flush=True)
        return self._train(plan)

    @staticmethod
    def _retry(act: Callable[[], T]) -> T:
        return retry(act, on=OSError, for_s=STORAGE_S, problem="the sweep's folder can't be used yet")


def _record(home: RunDirectory) -> SweepRecord:
    record = SweepRecord.read(home)
    if record is None:
        raise RunDirectoryError(f"{home.path}: expected the folder of a sweep, but it has no sweep.json")
    return record


def work_here(home: RunDirectory) -> int:
    """Train the runs of a search on this machine, one after another; return an `ExitCode`.

    Args:
        home: the folder of the sweep.

    Raises:
        HpctrainError: a run can't be prepared.
    """
    stop_file = home.sweep_stop_file
    stop_file.unlink(missing_ok=True)

    def train(plan: RunPlan) -> tuple[int, bool]:
        # advice on one run would mislead: the search continues it, at once or when it is resumed
        code = launch_here(plan, quiet=[Reason.PAUSED, Reason.INTERRUPTED])
        if stop_file.exists():
            return ExitCode.CANCELLED, True
        return code, is_stopped(plan.directory, code)

    task = f"{socket.gethostname()}:{os.getpid()}"
    code = SearchTask(home, task, train, max_new_runs=None).work()
    if code in (ExitCode.INTERRUPTED, ExitCode.CANCELLED):
        print(f"stopped; to resume: python -m hpctrain resume {home.as_typed}", file=sys.stderr)
    return code


def is_stopped(run: RunDirectory, code: int) -> bool:
    """Whether Ctrl-C ended a run here, which is meant for its whole sweep: a pause has the same exit code."""
    attempts = Ledger(run).attempts()
    return code == ExitCode.INTERRUPTED and not (attempts and attempts[-1].reason is Reason.PAUSED)


def plan_assigned(home: RunDirectory, record: SweepRecord, assignment: Assignment) -> RunPlan:
    """Make the run's directory, if it has none, and store until which step it is to be trained.

    Args:
        home: the folder of the sweep.
        record: of the sweep.
        assignment: the run.

    Raises:
        ConfigError: the values that were drawn don't fit together.
        RunDirectoryError: the directory can't be written.
    """
    directory = RunDirectory.at(home.path / str(assignment.run))
    if not directory.config.is_file():
        if algorithm_of(record).knows_runs:
            raise RunDirectoryError(f"{directory.path}: its config.yaml is gone; restore it, or remove the folder")
        # the task that began to make it was killed: the journal gave the number to this task alone
        shutil.rmtree(directory.path, ignore_errors=True)
        run = drawn_run(home, record, assignment)
        return prepare(
            run.at(directory.path).config,
            record.command,
            run.varied,
            manifest(record.command, Path(record.folder)),
            report=lambda _line: None,
            code=LaunchCode(home),
        )
    # no line on the changed key: all that changes is the step of the pause, which the search decides
    pause = assignment.pause_at_step
    changes = [] if pause is None else [f"{PAUSE}={pause}"]
    return prepare(changed_config(directory, changes, None), record.command, report=lambda _line: None)


def drawn_run(home: RunDirectory, record: SweepRecord, assignment: Assignment) -> SweepRun:
    """Compose a run from the values that were drawn for it, with the configuration files that were submitted.

    Raises:
        ConfigError: the values don't fit together.
        RunDirectoryError: files of the copied code are missing.
    """
    code = current_code(home)
    if code is not None and (damage := code.find_damage(contents=False)):
        raise RunDirectoryError(damage)
    folder = Path(record.folder) if code is None else code.working_directory
    composer = Composer(_in_copy(code, record.config_dir), folder)
    fixed = [override.partition("=")[0] for override in record.fixed]
    # a key that doesn't exist without the sweep was typed with a plus sign
    typed = {key.lstrip("+"): key for key in record.space}
    pairs = (override.partition("=") for override in assignment.overrides)
    drawn = [f"{typed.get(key, key)}={value}" for key, _, value in pairs]
    return SweepRun.compose(composer, [*record.fixed, *drawn], fixed)


def _in_copy(code: CodeSnapshot | None, folder: str | None) -> str | None:
    """Return the copy of a folder; the folder itself if it wasn't copied."""
    if code is None or folder is None:
        return folder
    place = os.path.relpath(folder, code.root)
    copied = code.folder / place
    return str(copied) if not place.startswith("..") and copied.is_dir() else folder


def _heading(assignment: Assignment, plan: RunPlan) -> str:
    """Say which run begins or continues, and to which step."""
    verb = "begins" if saved_step(plan.directory) == 0 else "continues"
    pause, last = assignment.pause_at_step, plan.training.trainer.max_steps
    until = "its end" if pause is None or (last is not None and last <= pause) else f"step {pause}"
    return f"run {assignment.run} {verb}, to {until}: {varied_text(trained_varied(plan.directory))}".rstrip(": ")


def _result(end: Decision) -> str:
    """Say how a run ended, and with which value the search compares it."""
    value = "" if end.value is None else f": {EVAL_PREFIX}{end.metric} {end.value:.4g}"
    return f"run {end.run} {end.reason} at step {end.step}{value}"

"""Train the runs that a search gives to one task, one after another."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hpctrain.config.checkpoint import EVAL_PREFIX
from hpctrain.errors import ERROR_PREFIX, ConfigError, ExitCode, RunDirectoryError
from hpctrain.launch.launcher import launch_here
from hpctrain.launch.prepare import RunPlan
from hpctrain.retry import retry
from hpctrain.run.checkpoints import saved_step
from hpctrain.run.config_change import trained_varied
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.run.manifest import varied_text
from hpctrain.run.reason import Reason
from hpctrain.search.journal import Decision
from hpctrain.search.open_search import open_search
from hpctrain.search.record import SweepRecord
from hpctrain.search.search import Assignment, Search
from hpctrain.sweep.assigned_run import plan_assigned

T = TypeVar("T")

STORAGE_S = 60.0
"""Seconds to retry I/O in the sweep's folder while its file system is unavailable."""


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """How the training of one run ended.

    Attributes:
        exit_code: an `ExitCode`.
        job_ends: whether the task has to end at once.
    """

    exit_code: int
    job_ends: bool = False


class Worker:
    """One task of a search.

    Args:
        home: the folder of the sweep.
        task: its id, the same after a requeue.
        train: trains a run, and returns how that ended.
        max_new_runs: new runs that the task may begin; None for no limit.
    """

    def __init__(
        self, home: RunDirectory, task: str, train: Callable[[RunPlan], TaskEnd], *, max_new_runs: int | None
    ) -> None:
        self.record: SweepRecord = _record(home)
        self.search: Search = open_search(home, self.record)
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
            end = self._train_one(assignment)
            if end.exit_code not in (ExitCode.FINISHED, ExitCode.INTERRUPTED):
                codes.append(end.exit_code)
            if end.job_ends:
                return end.exit_code
            state = self._retry(self.search.state)
            if assignment.run in state.given:
                # neither paused nor ended: it is left to `resume`
                return end.exit_code or ExitCode.INTERRUPTED
            if (passed := state.ends.get((assignment.run, assignment.rung))) is not None:
                _report(_result(passed))
        return next(iter(codes), ExitCode.FINISHED)

    def _ask(self) -> Assignment | None:
        if (record := _record(self._home)) != self.record:  # a resume has extended the search meanwhile
            self.record = record
            self.search = open_search(self._home, record)
        return self.search.ask(self._task, max_new_runs=self._max_new_runs)

    def _train_one(self, assignment: Assignment) -> TaskEnd:
        try:
            plan = self._retry(lambda: plan_assigned(self._home, self.record, assignment))
        except ConfigError as error:
            print(f"{ERROR_PREFIX}run {assignment.run}: {error}", file=sys.stderr, flush=True)
            self._retry(lambda: self.search.fail(assignment.run, assignment.rung))
            return TaskEnd(ExitCode.FAILED)
        _report(_heading(assignment, plan))
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

    def train(plan: RunPlan) -> TaskEnd:
        # advice on one run would mislead: the search continues it, at once or when it is resumed
        code = launch_here(plan, quiet=[Reason.PAUSED, Reason.INTERRUPTED])
        reason = next((attempt.reason for attempt in reversed(Ledger(plan.directory).attempts())), None)
        # Ctrl-C has the same exit code as a pause, and is meant for the whole search
        is_interrupted = code == ExitCode.INTERRUPTED and reason is not Reason.PAUSED
        if stop_file.exists():
            return TaskEnd(ExitCode.CANCELLED, job_ends=True)
        return TaskEnd(code, job_ends=is_interrupted)

    task = f"{socket.gethostname()}:{os.getpid()}"
    code = Worker(home, task, train, max_new_runs=None).work()
    if code in (ExitCode.INTERRUPTED, ExitCode.CANCELLED):
        print(f"stopped; to resume: python -m hpctrain resume {home.as_typed}", file=sys.stderr)
    return code


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


def _report(line: str) -> None:
    print(line, flush=True)

"""Assign runs to the tasks of a search, and record how they ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpctrain.config.checkpoint import EVAL_PREFIX
from hpctrain.config.sweep import SEARCHES
from hpctrain.errors import RunDirectoryError
from hpctrain.phrases import either
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import last_evaluation
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.run.sweep_record import REMEDY, SweepRecord
from hpctrain.search.algorithm import Algorithm, Asha, Grid, Random, SearchAlgorithm
from hpctrain.search.journal import FOLDER, Decision, Event, Journal, SearchState
from hpctrain.search.optuna_study import OptunaStudy


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A run that a task is to train.

    Attributes:
        run: its number.
        rung: the rung that it is to pass.
        pause_at_step: the step of that rung; None to train to the end.
        drawn: what the sampler drew for the run; empty where its configuration is known already.
    """

    run: int
    rung: int = 0
    pause_at_step: int | None = None
    drawn: Mapping[str, Any] = field(default_factory=dict)

    @property
    def overrides(self) -> list[str]:
        """The values that were drawn, as overrides."""
        params = self.drawn.get("params", {})
        return [f"{key}={repr(value) if isinstance(value, float) else value}" for key, value in params.items()]


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
    """A search, of which each task asks for a run; all they know of each other is the journal.

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

        Raises:
            OSError: the file system's error.
        """
        while True:
            self._journal.read()
            ends = (self._end(begin) for begin in self._journal.state.given.values())
            end = next((end for end in ends if end is not None), None)
            if end is None:
                return self._journal.state
            self._journal.publish(end)

    def ask(self, task: str, *, max_new_runs: int | None = 1) -> Assignment | None:
        """Return the run that a task is to train next; None if nothing is left for it.

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
            own = next((begin for begin in state.given.values() if begin.task == task), None)
            begin = own or self._next(state, task, max_new_runs)
            if begin is None:
                return None
            if own is not None or self._journal.publish(begin):
                pause = self.algorithm.pause_at_step(begin.rung)
                return Assignment(
                    run=begin.run, rung=begin.rung, pause_at_step=pause, drawn=state.first.get(begin.run, begin).drawn
                )

    def release(self, decisions: Iterable[Decision]) -> None:
        """Let any task continue runs whose own task is gone, or that failed or were cancelled.

        Args:
            decisions: the newest ones on these runs, a begin or an end each. A run on which another one follows
                meanwhile is left alone.

        Raises:
            OSError: the file system's error.
        """
        for seen in decisions:
            run, rung = seen.run, seen.rung
            release = Decision(event=Event.RELEASE, run=run, rung=rung, time=self._clock())
            while self._newest(run, rung) == seen and not self._journal.publish(release):
                pass

    def fail(self, run: int, rung: int) -> None:
        """Record that a run can't be trained.

        Raises:
            OSError: the file system's error.
        """
        end = Decision(event=Event.END, run=run, rung=rung, time=self._clock(), reason=Reason.FAILED.value)
        while run in self.state().given and not self._journal.publish(end):
            pass

    def create(self) -> None:
        """Make the journal's folder, with the permissions of the sweep's."""
        with self.home.permissions():
            (self.home.path / FOLDER).mkdir(exist_ok=True)

    def _next(self, state: SearchState, task: str, max_new_runs: int | None) -> Decision | None:
        released = sorted((self._unrecorded_ends(run), run, rung) for run, rung in state.released.items())
        if released and not released[0][0]:
            return self._begin(*released[0][1:], task)
        deadline = self.algorithm.record.deadline
        if deadline is None or self._clock() <= deadline:
            if promoted := self.algorithm.next_rungs(state):
                return self._begin(*promoted[0], task)
            begun = sum(begin.task == task for begin in state.first.values())
            may_begin = max_new_runs is None or begun < max_new_runs
            if may_begin and (new := self.algorithm.new_runs(state)):
                return self._begin(new[0], 0, task, self.algorithm.draw(state))
        return self._begin(*released[0][1:], task) if released else None

    def _unrecorded_ends(self, run: int) -> int:
        with contextlib.suppress(RunDirectoryError):  # one damaged run must not stop the others
            return Ledger(self.directory(run)).unrecorded_ends()
        return 0

    def _begin(self, run: int, rung: int, task: str, drawn: Mapping[str, Any] | None = None) -> Decision:
        return Decision(
            event=Event.BEGIN,
            run=run,
            rung=rung,
            time=self._clock(),
            task=task,
            claims_before=Ledger(self.directory(run)).last_claim(),
            drawn=drawn or {},
        )

    def _newest(self, run: int, rung: int) -> Decision | None:
        """The decision that holds for a run: its begin, or its end at this rung; None once it is released."""
        state = self.state()
        return state.given.get(run) or (None if run in state.released else state.ends.get((run, rung)))

    def _end(self, begin: Decision) -> Decision | None:
        """Return the end of what was given to a task; None while it may continue by itself."""
        directory = self.directory(begin.run)
        ledger = Ledger(directory)
        try:
            attempts = ledger.attempts()
            last_claim = ledger.last_claim()
        except RunDirectoryError:  # one damaged run must not stop the others
            return None
        last = next((attempt for attempt in reversed(attempts) if attempt.attempt > begin.claims_before), None)
        if last is None or last.reason is None or last.attempt < last_claim:
            return None
        reason = last.reason
        if last.continues or (reason.meaning.resumable and reason is not Reason.PAUSED):
            return None
        evaluation = last_evaluation(directory) if reason in (Reason.PAUSED, Reason.COMPLETED) else None
        score = None if evaluation is None else evaluation.best
        value: float | None = None
        if evaluation is not None and score is not None:
            is_best = self.algorithm.counts_best_value
            value = score.value if is_best else evaluation.means.get(f"{EVAL_PREFIX}{score.name}")
        return Decision(
            event=Event.END,
            run=begin.run,
            rung=begin.rung,
            step=last.end_step or 0,
            reason=reason.value,
            value=value,
            metric="" if score is None else score.name,
            mode="" if score is None else score.mode,
        )

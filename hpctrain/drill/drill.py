"""The drill: an uninterrupted run, an interrupted one, and the comparison of their results."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.drill.comparison import Row
from hpctrain.drill.console import Console
from hpctrain.drill.launched_run import LaunchedRun, LocalRun, SubmittedRun, saves_of
from hpctrain.drill.plan import Moment, Plan, TimePlan, signal_of
from hpctrain.phrases import counted
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Attempt, Ledger
from hpctrain.run.reason import Reason

# the drill itself watches its runs
FORCED = ("cluster.wait=false", "cluster.dry_run=false", "notify.command=null")
"""Overrides that no one can change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """An interruption that took effect.

    Attributes:
        how: the signal or command.
        step: the last step that the attempt completed; None if the run reports no steps.
        running_s: seconds for which the attempt ran.
        reason: why the attempt ended, from the ledger.
        saved: whether the run had saved something by its end.
    """

    how: str
    step: int | None
    running_s: float
    reason: Reason
    saved: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a drill.

    Attributes:
        straight: the uninterrupted run.
        interrupted: the interrupted run.
        interruptions: those that took effect.
        rows: the compared quantities.
        notes: what wasn't compared, and other remarks, as sentences.
        tolerance: the largest relative difference that is accepted.
        unproven: why the comparison says nothing, such as a run that was over too soon; empty if it does.
    """

    straight: RunDirectory
    interrupted: RunDirectory
    interruptions: tuple[Interruption, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    tolerance: float = 0.0
    unproven: str = ""

    @property
    def exact(self) -> bool:
        """Whether the run was interrupted, and the interruptions changed nothing."""
        return not self.unproven and all(row.equal for row in self.rows)

    @property
    def accepted(self) -> bool:
        """Whether the run was interrupted, and all differences are within the tolerance."""
        return not self.unproven and all(row.is_within(self.tolerance) for row in self.rows)


@dataclass(kw_only=True)
class Drill(ABC):
    """One drill.

    Args:
        home: the folder of both runs, which is empty.
        on_slurm: whether its runs are SLURM jobs.
        interruptions: number of interruptions.
        seed: of their moments and signals.
        console: displays the progress.
    """

    home: Path
    on_slurm: bool
    interruptions: int
    seed: int
    console: Console
    _running: list[LaunchedRun] = field(default_factory=list, init=False)

    def run(self) -> Report:
        """Make both runs, and compare them.

        Raises:
            RunFailedError: one of them failed for another reason than the drill's interruptions.
        """
        try:
            return self._run()
        except BaseException:  # also Ctrl-C and SIGTERM: the drill must not leave processes or jobs behind
            for run in self._running:
                run.stop()
            raise

    @abstractmethod
    def _run(self) -> Report: ...

    def _straight(self, words: Sequence[str]) -> tuple[LaunchedRun, Attempt]:
        """Make the uninterrupted run; return it, and the record of its last attempt.

        Args:
            words: the command line after `python -m hpctrain`, without the run directory.
        """
        run = self._launch("straight", words)
        began = time.monotonic()
        last = self._finish(run, 1)
        self.console.report(f"straight run: {_steps(last)}{time.monotonic() - began:.1f} s")
        return run, last

    def _interrupted(
        self, words: Sequence[str], plan: Plan | TimePlan
    ) -> tuple[RunDirectory, tuple[Interruption, ...]]:
        run = self._launch("interrupted", words)
        interruptions: list[Interruption] = []
        done, attempt = 0, 1
        for number in range(plan.interruptions):
            moment = plan.moment(done, number)
            if not self._reaches(run, attempt, moment):
                break
            how = run.interrupt(signal_of(number, plan.interruptions, self.seed))
            entry = run.end_of(attempt)
            done = entry.end_step or 0
            when = f"interrupted run: {how} {moment}"
            if entry.reason is Reason.COMPLETED:
                self.console.report(f"{when} came too late, the run was completed")
                break
            interruption = _describe(how, entry, run.directory)
            interruptions.append(interruption)
            self.console.report(f"{when}, stopped after {stopped_after(interruption)} ({entry.reason})")
            attempt += 1
            run.resume()
        last = self._finish(run, attempt)
        attempts = counted(last.attempt, "attempt")
        self.console.report(f"interrupted run: {_steps(last)}{attempts}")
        return run.directory, tuple(interruptions)

    def _launch(self, name: str, words: Sequence[str]) -> LaunchedRun:
        kind = SubmittedRun if self.on_slurm else LocalRun
        directory = RunDirectory.at(self.home / name)
        run = kind(directory, _with_run_dir(words, directory))
        self._running.append(run)
        run.launch()
        return run

    def _reaches(self, run: LaunchedRun, attempt: int, moment: Moment) -> bool:
        """Wait for a moment of an attempt; return whether it got that far."""
        for progress in run.progress(attempt):
            self.console.show_step("interrupted run", progress.step)
            if moment.is_reached(progress):
                return True
        return False

    def _finish(self, run: LaunchedRun, attempt: int) -> Attempt:
        """Wait until the run is completed, even if other causes interrupt it."""
        name = f"{run.directory.path.name} run"
        while True:
            for progress in run.progress(attempt):
                self.console.show_step(name, progress.step)
            entry = run.end_of(attempt)
            if entry.reason is Reason.COMPLETED:
                self._running.remove(run)
                return entry
            self.console.report(f"{name}: {entry.reason} after step {entry.end_step}, not by this drill")
            attempt += 1
            run.resume()


def unproven(interruptions: Sequence[Interruption], remedy: str) -> str:
    """Return why these interruptions prove nothing; empty if they do."""
    if not interruptions:
        return f"no interruption took effect before the run ended; {remedy}"
    if not any(one.saved for one in interruptions):
        return f"the run had saved nothing when it was interrupted, and began anew; {remedy}"
    return ""


def stopped_after(interruption: Interruption) -> str:
    """When an interruption took effect, such as `step 12`, or `3.4 s`."""
    return f"{interruption.running_s:.1f} s" if interruption.step is None else f"step {interruption.step}"


def duration_s(directory: RunDirectory) -> float:
    """Seconds for which the attempts of a run ran."""
    return sum(map(_duration_s, Ledger(directory).attempts()))


def step_s(attempt: Attempt) -> float:
    """Mean seconds per step of an attempt, after the first; 0 if they weren't measured."""
    steps = (attempt.end_step or 0) - (attempt.start_step or 0)
    return (attempt.train_s or 0.0) / max(1, steps - 1)


def _duration_s(entry: Attempt) -> float:
    return max(0.0, (entry.end_time or 0.0) - (entry.start_time or 0.0)) if entry.end_time and entry.start_time else 0.0


def _describe(how: str, entry: Attempt, directory: RunDirectory) -> Interruption:
    assert entry.reason is not None
    saved = any(saves_of(directory))
    step = entry.end_step or None
    return Interruption(how=how, step=step, running_s=_duration_s(entry), reason=entry.reason, saved=saved)


def _steps(last: Attempt) -> str:
    """The steps of a run, if it reported them, and the word before what it needed for them."""
    return f"{counted(last.end_step, 'step')} in " if last.end_step else ""


def _with_run_dir(words: Sequence[str], directory: RunDirectory) -> list[str]:
    """Add the run directory, which belongs before the command of a program."""
    position = list(words).index("--") if "--" in words else len(words)
    return [*words[:position], f"run_dir={directory.path}", *words[position:]]

"""The drill: an uninterrupted run, one that is interrupted at random moments, and the comparison of their results."""

from __future__ import annotations

import math
import random
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from hpctrain.drill.comparison import ComparisonRow
from hpctrain.drill.launched_run import AttemptProgress, LaunchedRun, LocalRun, SubmittedRun, saves_of
from hpctrain.phrases import counted
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Attempt, Ledger
from hpctrain.run.reason import Reason
from hpctrain.terminal import is_terminal, unguarded, visible

REDRAW_S = 0.1
SIGNALS = (signal.SIGTERM, signal.SIGINT)
MARGIN = 1.5
"""Factor by which a training should be longer than its reactions to all interruptions."""
START = 0.2
"""Share of a run's duration in which a program that reports no steps, and saves only at its end, probably starts."""
LATE = 0.8
"""Share of a run's duration from which on a first save is no sign that the program saves while it runs."""
OF_SHARE = (0.3, 0.9)
"""The part of its share of a run's duration after which an attempt is interrupted."""
# the drill itself watches its runs
FORCED = ("cluster.wait=false", "cluster.dry_run=false", "notify.command=null")
"""Overrides that no one can change."""


class Console:
    """Prints events; on a terminal also the current step, in one line that is drawn again and again."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = unguarded(stream)
        self._is_terminal = is_terminal(stream)
        self._drawn_at = 0.0

    def show_step(self, run: str, step: int | None) -> None:
        """Show the last step that a run completed, if one is known."""
        now = time.monotonic()
        if step is not None and self._is_terminal and now - self._drawn_at >= REDRAW_S:
            self._drawn_at = now
            self._write(f"\r\x1b[K{visible(run)}: step {step}")

    def report(self, event: str) -> None:
        """Print an event."""
        self._write(f"\r\x1b[K{visible(event)}\n" if self._is_terminal else f"{visible(event)}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


@dataclass(frozen=True, slots=True)
class Moment:
    """When to interrupt an attempt: after a step, or so many seconds after its start or its first save."""

    step: int | None = None
    running_s: float = 0.0
    after_save: bool = False

    def __str__(self) -> str:
        if self.step is not None:
            return f"after step {self.step}"
        return f"{self.running_s:.1f} s after its {'first save' if self.after_save else 'start'}"

    def is_reached(self, progress: AttemptProgress) -> bool:
        """Whether an attempt is that far."""
        if self.step is not None:
            return progress.step is not None and progress.step >= self.step
        since = progress.first_save_s if self.after_save else 0.0
        return since is not None and progress.running_s - since >= self.running_s


@dataclass(frozen=True, slots=True)
class TimePlan:
    """The interruptions of a program that reports no steps; the same for the same seed and duration.

    Args:
        interruptions: number of interruptions.
        seed: of the random draws.
        duration_s: of the uninterrupted run.
        first_save_s: seconds from its start to its first save, before which an interruption proves little; None if it
            isn't known.
    """

    interruptions: int
    seed: int
    duration_s: float
    first_save_s: float | None = None

    def moment(self, done: int, number: int) -> Moment:  # noqa: ARG002 - the program doesn't report it
        """When to interrupt the attempt with this number, counted from 0."""
        first_s = self.first_save_s
        saves_early = first_s is not None and first_s <= LATE * self.duration_s
        start_s = first_s if first_s is not None and saves_early else START * self.duration_s
        share_s = (self.duration_s - start_s) / self.interruptions
        after_s = share_s * _random(self.seed, number).uniform(*OF_SHARE)
        return Moment(running_s=after_s if saves_early else start_s + after_s, after_save=saves_early)


@dataclass(frozen=True, slots=True)
class Plan:
    """The interruptions of one drill; the same for the same seed.

    Args:
        interruptions: number of interruptions.
        seed: of the random draws.
        total_steps: of the training.
        reaction_steps: number of steps that may pass between an interruption and the attempt's last step.
        first_evaluation: the step after which the training is first evaluated; 0 if it isn't evaluated.
    """

    interruptions: int
    seed: int
    total_steps: int
    reaction_steps: int
    first_evaluation: int = 0

    def moment(self, done: int, number: int) -> Moment:
        """When to interrupt, as `target`."""
        return Moment(step=self.target(done, number))

    def target(self, done: int, number: int) -> int:
        """The step after which to interrupt; the attempt has completed at least one step by then.

        Of several interruptions, the first comes before the first evaluation, and the others after it, if the steps
        suffice: what an evaluation leaves behind must survive an interruption, too.

        Args:
            done: steps that earlier attempts completed.
            number: of the interruption, counted from 0.
        """
        remaining = self.interruptions - number
        begin, spare = done + 1, self._spare(done, remaining)
        if self.interruptions > 1 and number == 0 and self.first_evaluation:
            spare = min(spare, max(0, remaining * (self.first_evaluation - self.reaction_steps - begin)))
        elif number and done < self.first_evaluation and self._spare(self.first_evaluation, remaining) >= remaining:
            begin, spare = self.first_evaluation + 1, self._spare(self.first_evaluation, remaining)
        return begin + _random(self.seed, number).randrange(max(1, math.ceil(spare / remaining)))

    def _spare(self, done: int, remaining: int) -> int:
        """Return the steps among which the remaining interruptions can be drawn."""
        return max(0, self.total_steps - done - 1 - self.reaction_steps * remaining)


def signal_of(interruption: int, interruptions: int, seed: int) -> signal.Signals:
    """Return the signal of an interruption, counted from 0, if the run is interrupted by signals."""
    return _random(seed, interruption + interruptions).choice(SIGNALS)


def enough_steps(interruptions: int, reaction_s: float, step_s: float) -> int:
    """Return the number of steps that a training needs for its interruptions.

    Args:
        interruptions: how many.
        reaction_s: seconds between an interruption and the attempt's last step.
        step_s: seconds of a step.
    """
    return math.ceil(MARGIN * interruptions * (reaction_s / max(step_s, 1e-6) + 2))


def _random(seed: int, number: int) -> random.Random:
    # one generator per interruption: the time at which one took effect doesn't change the next
    return random.Random(f"{seed}.{number}")


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
    rows: tuple[ComparisonRow, ...]
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
        overrides: with which its runs are launched; see `overrides_of`.
        config_dir: a folder with more configuration.
    """

    home: Path
    on_slurm: bool
    interruptions: int
    seed: int
    console: Console
    overrides: Sequence[str]
    config_dir: str | None
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

    @property
    def _options(self) -> list[str]:
        """The options of the command line of its runs."""
        return [] if self.config_dir is None else ["--config-dir", self.config_dir]

    def _run_straight(self, words: Sequence[str]) -> tuple[LaunchedRun, Attempt]:
        """Make the uninterrupted run; return it, and the record of its last attempt.

        Args:
            words: the command line after `python -m hpctrain`, without the run directory.
        """
        run = self._launch("straight", words)
        began = time.monotonic()
        last = self._finish(run, 1)
        self.console.report(f"straight run: {_steps(last)}{time.monotonic() - began:.1f} s")
        return run, last

    def _run_interrupted(
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
    if not any(interruption.saved for interruption in interruptions):
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


def steps_in(seconds: float, attempt: Attempt) -> int:
    """The number of steps of an attempt that may begin within so many seconds."""
    return int(seconds / max(step_s(attempt), 1e-6)) + 1


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

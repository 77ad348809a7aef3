"""The moments at which a drill interrupts: random, and early enough to take effect before the run ends."""

from __future__ import annotations

import math
import random
import signal
from dataclasses import dataclass

SIGNALS = (signal.SIGTERM, signal.SIGINT)
MARGIN = 1.5
"""Factor by which a training should be longer than its reactions to all interruptions."""
START = 0.2
"""Share of a run's duration in which a program that reports no steps, and saves only at its end, probably starts."""
LATE = 0.8
"""Share of a run's duration from which on a first save is no sign that the program saves while it runs."""
OF_SHARE = (0.3, 0.9)
"""The part of its share of a run's duration after which an attempt is interrupted."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a running attempt is.

    Attributes:
        step: the last step that it is known to have completed; None before its first.
        running_s: seconds since its start was recorded.
        first_save_s: of these, those before its first save; None before it.
    """

    step: int | None
    running_s: float
    first_save_s: float | None = None


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

    def is_reached(self, progress: Progress) -> bool:
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
        left = self.interruptions - number
        begin, spare = done + 1, self._spare(done, left)
        if self.interruptions > 1 and number == 0 and self.first_evaluation:
            spare = min(spare, max(0, left * (self.first_evaluation - self.reaction_steps - begin)))
        elif number and done < self.first_evaluation and self._spare(self.first_evaluation, left) >= left:
            begin, spare = self.first_evaluation + 1, self._spare(self.first_evaluation, left)
        return begin + _random(self.seed, number).randrange(max(1, math.ceil(spare / left)))

    def _spare(self, done: int, left: int) -> int:
        """Return the steps among which the remaining interruptions can be drawn."""
        return max(0, self.total_steps - done - 1 - self.reaction_steps * left)


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

"""The steps at which a drill interrupts: random, and early enough for the stop to take effect before the run ends."""

from __future__ import annotations

import math
import random
import signal
from dataclasses import dataclass

SIGNALS = (signal.SIGTERM, signal.SIGINT)
MARGIN = 1.5
"""Factor by which a training should be longer than its reactions to all interruptions."""


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
        return begin + self._random(number).randrange(max(1, math.ceil(spare / left)))

    def signal(self, number: int) -> signal.Signals:
        """The signal of an interruption, if the training is interrupted by signals."""
        return self._random(number + self.interruptions).choice(SIGNALS)

    def _spare(self, done: int, left: int) -> int:
        """Return the steps among which the remaining interruptions can be drawn."""
        return max(0, self.total_steps - done - 1 - self.reaction_steps * left)

    def _random(self, number: int) -> random.Random:
        # one generator per interruption: the time at which one took effect doesn't change the next
        return random.Random(f"{self.seed}.{number}")


def enough_steps(interruptions: int, reaction_s: float, step_s: float) -> int:
    """Return the number of steps that a training needs for its interruptions.

    Args:
        interruptions: how many.
        reaction_s: seconds between an interruption and the attempt's last step.
        step_s: seconds of a step.
    """
    return math.ceil(MARGIN * interruptions * (reaction_s / max(step_s, 1e-6) + 2))

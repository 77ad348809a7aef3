"""When a drill interrupts: steps drawn at random, early enough for the stop to be noticed before the run ends."""

from __future__ import annotations

import math
import random
import signal
from dataclasses import dataclass

SIGNALS = (signal.SIGTERM, signal.SIGINT)
MARGIN = 1.5
"""How much longer than its reactions to all interruptions a training should be."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The interruptions of one drill; the same for the same seed.

    Args:
        interruptions: how many.
        seed: of the draws.
        total_steps: of the training.
        reaction_steps: that may pass between an interruption and the attempt's last step.
    """

    interruptions: int
    seed: int
    total_steps: int
    reaction_steps: int

    def target(self, done: int, number: int) -> int:
        """The step after which to interrupt: at least one step of the attempt is done by then.

        Args:
            done: steps that earlier attempts completed.
            number: of the interruption, from 0.
        """
        left = self.interruptions - number
        room = max(0, self.total_steps - done - 1 - self.reaction_steps * left)
        return done + 1 + self._draws(number).randrange(max(1, math.ceil(room / left)))

    def signal(self, number: int) -> signal.Signals:
        """The signal of an interruption, where it is made by one."""
        return self._draws(number + self.interruptions).choice(SIGNALS)

    def _draws(self, number: int) -> random.Random:
        # a draw of its own each: what one interruption hit doesn't change the next
        return random.Random(f"{self.seed}.{number}")


def enough_steps(interruptions: int, reaction_s: float, step_s: float) -> int:
    """Steps of a training that leaves room for so many interruptions.

    Args:
        interruptions: how many.
        reaction_s: seconds between an interruption and the attempt's last step.
        step_s: seconds of a step.
    """
    return math.ceil(MARGIN * interruptions * (reaction_s / max(step_s, 1e-6) + 2))

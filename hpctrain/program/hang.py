"""Notice that a program which reports its steps has stopped making them."""

from __future__ import annotations

from hpctrain.attempt.silence import Silence
from hpctrain.config.health import Health
from hpctrain.program.session_events import Progress

LOOK_S = 1.0
"""Seconds between two looks."""


class HangWatch:
    """Measures the time without a new step, from the start of the program's session until it is done.

    Args:
        health: the bounds.
    """

    def __init__(self, health: Health) -> None:
        self._health = health
        self._silence: Silence | None = None

    def look(self, progress: Progress, stops: int, now: float) -> str:
        """Describe the missing progress with the bound and its key; empty if the program doesn't hang.

        Args:
            progress: as reported.
            stops: how often the program was asked to stop; a save takes time as well.
            now: seconds on a monotonic clock.
        """
        if not progress.started or progress.done:
            return ""
        if self._silence is None:
            self._silence = Silence(now, 2 * LOOK_S)
        key, missing = "hang_timeout_s", "no step for"
        if progress.first_step is None:
            key, missing = "start_timeout_s", "start-up and no first step for"
        bound_s = self._health.bound_s(key)
        seconds = self._silence.look((progress.changes, stops), now)
        return f"{missing} {bound_s:g} s (health.{key})" if seconds >= bound_s else ""

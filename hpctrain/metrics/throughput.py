"""How fast a run goes, from a counter that the loop keeps anyway: no cost per step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Throughput:
    """Speed of an attempt; time paused doesn't count.

    Args:
        samples_seen: samples over all ranks before this attempt.
        clock: seconds, monotonic.
    """

    def __init__(self, samples_seen: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._paused_s = 0.0
        self._begin_s, self._samples_seen = clock(), samples_seen

    def rate(self, samples_seen: int) -> float:
        """Samples per second, over all ranks, since the last time it was asked for; 0.0 where no time has passed."""
        now_s = self._clock() - self._paused_s
        seconds, samples = now_s - self._begin_s, samples_seen - self._samples_seen
        self._begin_s, self._samples_seen = now_s, samples_seen
        return samples / seconds if seconds > 0 else 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time within belongs to no window: evaluation, a synchronous save."""
        begin = self._clock()
        try:
            yield
        finally:
            self._paused_s += self._clock() - begin

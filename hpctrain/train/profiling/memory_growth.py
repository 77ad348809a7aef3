"""Detect memory use that grows with each step."""

from __future__ import annotations

MAX_READINGS = 64
"""Readings to keep; beyond this, every other one is dropped, and new ones are taken half as often."""
MIN_READINGS = 6
"""Readings needed to distinguish growth from noise."""
NOTEWORTHY_BYTES = 16 * 2**20
NOTEWORTHY_SHARE = 0.05
"""Growth below this size, or below this share of the memory in use, isn't reported."""
STEADY = 0.5
"""Least growth of the second half, relative to the first: caches fill up and then stop growing."""


class MemoryGrowth:
    """Readings of the memory in use, thinned out so that they span the attempt."""

    def __init__(self) -> None:
        self._readings: list[tuple[int, int]] = []
        self._every = 1
        self._seen = 0

    def add(self, step: int, used_bytes: int) -> None:
        """Add the memory in use after ``step`` completed steps; always read at the same place of a step."""
        self._seen += 1
        if self._seen % self._every:
            return
        self._readings.append((step, used_bytes))
        if len(self._readings) > MAX_READINGS:
            self._readings = self._readings[::2]
            self._every *= 2

    def bytes_per_step(self) -> float:
        """Return the growth of memory use per step if it is steady and noticeable; otherwise 0."""
        # leave out the first quarter, in which allocators, caches and optimizers reach their size
        readings = self._readings[len(self._readings) // 4 :]
        if len(readings) < MIN_READINGS:
            return 0.0
        begin, middle, end = readings[0], readings[len(readings) // 2], readings[-1]
        grown = end[1] - begin[1]
        if grown < max(NOTEWORTHY_BYTES, NOTEWORTHY_SHARE * begin[1]):
            return 0.0
        early, late = _slope(begin, middle), _slope(middle, end)
        third = len(readings) // 3
        ever_higher = max(used for _, used in readings[:third]) < min(used for _, used in readings[-third:])
        if early <= 0 or late < STEADY * early or not ever_higher:
            return 0.0
        return _slope(begin, end)


def _slope(begin: tuple[int, int], end: tuple[int, int]) -> float:
    return (end[1] - begin[1]) / max(1, end[0] - begin[0])

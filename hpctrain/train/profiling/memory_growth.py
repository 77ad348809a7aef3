"""Detect memory use that grows with each step."""

from __future__ import annotations

MAX_READINGS = 64
"""With more, every other reading is dropped, and the next ones come half as often."""
MIN_READINGS = 6
"""Fewer aren't enough to tell growth from noise."""
NOTEWORTHY_BYTES = 16 * 2**20
NOTEWORTHY_SHARE = 0.05
"""Growth below this size, or below this share of the memory in use, isn't reported."""
STEADY = 0.5
"""The second half must grow at least this fast, compared with the first: caches fill up and then stop."""


class MemoryGrowth:
    """Readings of the memory in use, thinned out so that they span the attempt."""

    def __init__(self) -> None:
        self._readings: list[tuple[int, int]] = []
        self._every = 1
        self._seen = 0

    def add(self, step: int, used_bytes: int) -> None:
        """Add what is in use after ``step`` completed steps; read at the same place of each step."""
        self._seen += 1
        if self._seen % self._every:
            return
        self._readings.append((step, used_bytes))
        if len(self._readings) > MAX_READINGS:
            self._readings = self._readings[::2]
            self._every *= 2

    def bytes_per_step(self) -> float:
        """Return how fast memory use grows, if it grows steadily and noticeably; otherwise 0."""
        # in the first quarter allocators, caches and optimizers take what they need
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

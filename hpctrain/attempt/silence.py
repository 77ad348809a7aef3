"""The time for which a rank has shown no progress."""

from __future__ import annotations


class Silence:
    """Measures how long a mark stays the same, by looking at it repeatedly.

    Args:
        now: seconds on a monotonic clock.
        longest_gap_s: the most that one look may add; more than the usual time between two looks.
    """

    def __init__(self, now: float, longest_gap_s: float) -> None:
        self._looked_at = now
        self._longest_gap_s = longest_gap_s
        self._mark: object = None
        self.seconds = 0.0

    def look(self, mark: object, now: float) -> float:
        """Seconds of silence up to now; 0 if the mark has changed since the last look."""
        # a late look means that the whole process stood still, perhaps suspended by a scheduler, which isn't a hang
        elapsed = min(now - self._looked_at, self._longest_gap_s)
        self._looked_at = now
        self.seconds = self.seconds + elapsed if mark == self._mark else 0.0
        self._mark = mark
        return self.seconds

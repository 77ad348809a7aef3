"""How long nothing has moved."""

from __future__ import annotations


class Silence:
    """Adds up the time between looks that saw the same mark.

    A look that comes late counts no more than `longest_gap_s`: while this whole process stood still, suspended by its
    scheduler say, it could make no progress, and that is no hang.

    Args:
        now: seconds on a monotonic clock.
        longest_gap_s: more than the usual time between two looks.
    """

    def __init__(self, now: float, longest_gap_s: float) -> None:
        self._looked_at, self._longest_gap_s = now, longest_gap_s
        self._mark: object = None
        self.seconds = 0.0

    def look(self, mark: object, now: float) -> float:
        """Seconds of silence up to now; 0 where the mark isn't the one of the last look."""
        elapsed, self._looked_at = min(now - self._looked_at, self._longest_gap_s), now
        self.seconds = self.seconds + elapsed if mark == self._mark else 0.0
        self._mark = mark
        return self.seconds

"""Memory that grows with each step."""

from __future__ import annotations

MAX_LOOKS = 64
"""Beyond it every other look is forgotten, and the next ones come half as often."""
MIN_LOOKS = 8
NOTEWORTHY_BYTES = 16 * 2**20
NOTEWORTHY_SHARE = 0.05
"""Growth that is less than this, or than this share of what there was, is nobody's business."""
STEADY = 0.5
"""Growth that goes on is at least this fast, in the second half, compared with the first: caches fill and then stop."""


class Growth:
    """Looks at the memory in use, thinned out so that they span the attempt."""

    def __init__(self) -> None:
        self._looks: list[tuple[int, int]] = []
        self._every = 1
        self._seen = 0

    def look(self, step: int, used_bytes: int) -> None:
        """Note what was in use after ``step`` completed steps, at the same place of each."""
        self._seen += 1
        if self._seen % self._every:
            return
        self._looks.append((step, used_bytes))
        if len(self._looks) > MAX_LOOKS:
            self._looks = self._looks[::2]
            self._every *= 2

    def bytes_per_step(self) -> float:
        """How fast it grows, if it does so steadily and to an extent that matters; else 0.

        The first quarter is left out: there allocators, caches and optimizers take what they need.
        """
        looks = self._looks[len(self._looks) // 4 :]
        if len(looks) < MIN_LOOKS * 3 // 4:
            return 0.0
        begin, middle, end = looks[0], looks[len(looks) // 2], looks[-1]
        grown = end[1] - begin[1]
        if grown < max(NOTEWORTHY_BYTES, NOTEWORTHY_SHARE * begin[1]):
            return 0.0
        early, late = _slope(begin, middle), _slope(middle, end)
        third = len(looks) // 3
        ever_higher = max(used for _, used in looks[:third]) < min(used for _, used in looks[-third:])
        if early <= 0 or late < STEADY * early or not ever_higher:
            return 0.0
        return _slope(begin, end)


def _slope(begin: tuple[int, int], end: tuple[int, int]) -> float:
    return (end[1] - begin[1]) / max(1, end[0] - begin[0])

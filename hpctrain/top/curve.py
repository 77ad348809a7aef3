"""The values of one metric by step, thinned out as they become many."""

from __future__ import annotations

import math
from collections.abc import Sequence

POINTS = 512
"""Points that a curve keeps at most; beyond, every second one is dropped."""
_BLOCKS = "▁▂▃▄▅▆▇█"


class LiveCurve:
    """The values of a metric.

    Attributes:
        steps: of the kept points, ascending.
        values: of the kept points; NaN and infinities included.
    """

    __slots__ = ("_every", "_skipped", "steps", "values")

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self._every = 1
        self._skipped = 0

    def add(self, step: int, value: float) -> None:
        """Add a value; the newest one is always kept."""
        if self.steps and self._skipped:
            # the last point stands for those that were skipped before it
            self.steps[-1] = step
            self.values[-1] = value
        else:
            self.steps.append(step)
            self.values.append(value)
        self._skipped = (self._skipped + 1) % self._every
        if len(self.steps) >= POINTS:
            del self.steps[:-1:2]
            del self.values[:-1:2]
            self._every *= 2

    def points(self) -> list[tuple[int, float]]:
        """The steps and values, copied: another thread may add some at the same time."""
        return list(zip(list(self.steps), list(self.values), strict=False))


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw the newest values as blocks, the lowest value as the lowest block; `!` where it is NaN or infinite.

    Args:
        values: oldest first.
        width: characters.
    """
    shown = _thinned(values, width)
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_block(value, low, high) for value in shown)


def _thinned(values: Sequence[float], width: int) -> list[float]:
    count = len(values)
    if count <= width:
        return list(values)
    return [values[(number + 1) * count // width - 1] for number in range(width)]


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return "!"
    # scaled before they are subtracted: the difference of two large values may be infinite
    share = 0.0 if high == low else (value / 2 - low / 2) / (high / 2 - low / 2)
    return _BLOCKS[min(len(_BLOCKS) - 1, int(share * len(_BLOCKS)))]

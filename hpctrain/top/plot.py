"""Draw a curve with Braille characters: two by four dots each."""

from __future__ import annotations

import math
from collections.abc import Sequence

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_LABEL = 10


def plot(curve: Sequence[tuple[int, float]], width: int, height: int) -> list[str]:
    """Draw values over steps, with their range on the left and the steps below.

    Args:
        curve: steps, ascending, and values; those that aren't finite are left out.
        width: characters of a line.
        height: lines, at least 3.

    Returns:
        The lines, none longer than the width.
    """
    points = [(step, value) for step, value in curve if math.isfinite(value)]
    columns, rows = max(1, width - _LABEL - 1), max(1, height - 1)
    if not points:
        return ["no finite value yet"]
    low, high = min(value for _, value in points), max(value for _, value in points)
    first, last = points[0][0], points[-1][0]
    cells = [[0] * columns for _ in range(rows)]
    before: tuple[int, int] | None = None
    for step, value in points:
        across = 0 if last == first else round((step - first) / (last - first) * (columns * 2 - 1))
        up = 0 if high == low else round((value / 2 - low / 2) / (high / 2 - low / 2) * (rows * 4 - 1))
        for x, y in _line(before or (across, up), (across, up)):
            cells[rows - 1 - y // 4][x // 2] |= _DOTS[3 - y % 4][x % 2]
        before = (across, up)
    labels = [""] * rows
    labels[0] = f"{high:.4g}"
    if rows > 1:
        labels[-1] = f"{low:.4g}"
    lines = [
        f"{label:>{_LABEL}}│{''.join(chr(0x2800 + dots) for dots in row)}"
        for label, row in zip(labels, cells, strict=True)
    ]
    start, end = f"step {first}", str(last)
    return [*lines, f"{'':{_LABEL}} {start}{end:>{max(0, columns - len(start))}}"[:width]]


def _line(begin: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots from one to another, both included."""
    (x, y), (to_x, to_y) = begin, end
    count = max(abs(to_x - x), abs(to_y - y), 1)
    return [(x + round((to_x - x) * part / count), y + round((to_y - y) * part / count)) for part in range(count + 1)]

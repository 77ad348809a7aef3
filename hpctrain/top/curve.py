"""The curves of metrics: read as they are logged, thinned out as they become many, and drawn with characters."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from hpctrain.files import json_lines
from hpctrain.run.growing_file import GrowingFile
from hpctrain.status.metrics import NO_METRICS, LoggedMetrics, metrics_of

POINTS = 512
"""Points that a curve keeps at most; beyond, every second one is dropped."""
FileStamp = tuple[int, int, int] | None
"""The inode, size and time of a file, which show a change; None if it doesn't exist."""
_BLOCKS = "▁▂▃▄▅▆▇█"


class LiveCurve:
    """The values of a metric by step, NaN and infinities included."""

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []
        self._every = 1
        self._skipped = 0

    def add(self, step: int, value: float) -> None:
        """Add a value; the newest one is always kept."""
        if self._points and self._skipped:
            # the last point stands for those that were skipped before it
            self._points[-1] = (step, value)
        else:
            self._points.append((step, value))
        self._skipped = (self._skipped + 1) % self._every
        if len(self._points) >= POINTS:
            del self._points[:-1:2]
            self._every *= 2

    def points(self) -> list[tuple[int, float]]:
        """The steps, ascending, and values, copied: another thread may add some at the same time."""
        return list(self._points)


class MetricCurves:
    """The curves of a run's metrics, and the last values, read as metrics.jsonl grows.

    Args:
        path: of the file.
        last_bytes: at its end that are read first: it may be huge.

    Attributes:
        last_bytes: as given.
        by_name: the curves; a new mapping whenever they change, since another thread may draw them.
        last: the last value of each metric, with the step and the time of the last record.
    """

    def __init__(self, path: Path, last_bytes: int) -> None:
        self.last_bytes = last_bytes
        self.by_name: dict[str, LiveCurve] = {}
        self.last = NO_METRICS
        self._file = GrowingFile(path, -last_bytes)
        self._stamp: FileStamp = None

    def read(self, *, if_changed: bool = False) -> bool:
        """Read what was logged since the last call; return whether anything has changed.

        Args:
            if_changed: whether the file isn't opened if its stamp is that of the last read. Over NFS, only an open is
                sure to show what another machine has appended, but a stamp costs a tenth of one.
        """
        try:
            stamp = file_stamp(str(self._file.path))
            if if_changed and stamp == self._stamp:
                return False
            appended = self._file.read_lines()
            self._stamp = stamp
        except OSError:  # an unreadable file hides only the metrics
            return False
        # a resume has dropped the records after the step from which it starts
        curves = {} if appended.anew else dict(self.by_name)
        last = NO_METRICS if appended.anew else self.last
        for record in metrics_of(json_lines(appended.lines)):
            last = LoggedMetrics(record.step, record.time, {**last.values, **record.values})
            for name, value in record.values.items():
                curves.setdefault(name, LiveCurve()).add(record.step, value)
        self.by_name = curves
        self.last = last
        return appended.anew or bool(appended.lines)


def file_stamp(path: str) -> FileStamp:
    """Return a file's stamp.

    Raises:
        OSError: it can't be looked at.
    """
    try:
        status = os.stat(path)  # noqa: PTH116 - a third of the time of Path.stat
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw the newest values as blocks, the lowest value as the lowest block; `!` where it is NaN or infinite.

    Args:
        values: oldest first.
        width: characters.
    """
    points = _thinned(values, width)
    finite = [value for value in points if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_block(value, low, high) for value in points)


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

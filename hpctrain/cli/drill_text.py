"""What a drill shows."""

from __future__ import annotations

import os
import time
from typing import TextIO

from hpctrain.drill.comparison import Row
from hpctrain.drill.drill import Report

REDRAW_S = 0.1
LONGEST = 28
"""Characters of a cell; a digest is cut."""


class Console:
    """Lines about what happened; on a terminal the step in between, in place."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._terminal = stream, stream.isatty()
        self._drawn_at = 0.0

    def step(self, what: str, step: int) -> None:
        """See `hpctrain.drill.drill.Progress`."""
        now = time.monotonic()
        if self._terminal and now - self._drawn_at >= REDRAW_S:
            self._drawn_at = now
            self._put(f"\r\x1b[K{what}: step {step}")

    def say(self, text: str) -> None:
        """See `hpctrain.drill.drill.Progress`."""
        self._put(f"\r\x1b[K{text}\n" if self._terminal else f"{text}\n")

    def _put(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def table(report: Report) -> str:
    """What was compared, side by side."""
    rows = [
        ("", "STRAIGHT", "INTERRUPTED", ""),
        ("attempts", "1", str(len(report.interruptions) + 1), ""),
        *((row.what, _short(row.straight), _short(row.interrupted), _judged(row)) for row in report.rows),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in rows]
    return "\n".join(lines)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:12]}..."


def _judged(row: Row) -> str:
    return "equal" if row.equal else ", ".join(filter(None, ("DIFFERS", row.difference)))


def verdict(report: Report) -> str:
    """The outcome in a sentence or two, and where the runs are."""
    home = os.path.relpath(report.straight.path.parent)
    steps = ", ".join(str(one.step) for one in report.interruptions)
    if not report.interruptions:
        return (
            "nothing is proven: no interruption came in time; "
            f"train longer with trainer.max_steps, or slower. The runs are in {home}"
        )
    if report.exact:
        return f"exact: interrupted after steps {steps}, nothing differs. The runs are in {home}"
    differing = ", ".join(row.what for row in report.rows if not row.equal)
    return f"not exact: interrupted after steps {steps}, and these differ: {differing}. The runs are in {home}"

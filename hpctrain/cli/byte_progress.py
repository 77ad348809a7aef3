"""A line on a terminal that shows how much of something large is done."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from hpctrain.phrases import byte_size
from hpctrain.terminal import can_redraw, unguarded

SHOWN_AFTER_S = 1.0
"""Seconds that something takes before it is shown."""
REDRAW_S = 0.2
CLEAR_LINE = "\r\x1b[K"


class ByteProgress:
    """Draws a line again and again, on a terminal alone.

    Args:
        work: what is done, such as `writing`.
        stream: None for standard error.
        clock: monotonic seconds.
    """

    def __init__(self, work: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._work = work
        self._stream = unguarded(sys.stderr if stream is None else stream)
        self._clock = clock
        self._is_shown = can_redraw(self._stream)
        self._next_at = clock() + SHOWN_AFTER_S
        self._is_drawn = False

    def show(self, done: int, total: int) -> None:
        """Show how many bytes are done, not more often than necessary."""
        if self._is_shown and self._clock() >= self._next_at:
            self._next_at = self._clock() + REDRAW_S
            self._is_drawn = True
            self._stream.write(f"{CLEAR_LINE}{self._work}: {byte_size(done)} of {byte_size(total)}")
            self._stream.flush()

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the line."""
        if self._is_drawn:
            self._stream.write(CLEAR_LINE)
            self._stream.flush()

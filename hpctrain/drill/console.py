"""The display of a drill's progress."""

from __future__ import annotations

import time
from typing import TextIO

from hpctrain.terminal import is_terminal, unguarded, visible

REDRAW_S = 0.1


class Console:
    """Prints events; on a terminal also the current step, in one line that is drawn again and again."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = unguarded(stream)
        self._is_terminal = is_terminal(stream)
        self._drawn_at = 0.0

    def show_step(self, run: str, step: int | None) -> None:
        """Show the last step that a run completed, if one is known."""
        now = time.monotonic()
        if step is not None and self._is_terminal and now - self._drawn_at >= REDRAW_S:
            self._drawn_at = now
            self._write(f"\r\x1b[K{visible(run)}: step {step}")

    def report(self, event: str) -> None:
        """Print an event."""
        self._write(f"\r\x1b[K{visible(event)}\n" if self._is_terminal else f"{visible(event)}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

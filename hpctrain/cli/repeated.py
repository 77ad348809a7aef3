"""Show what a command prints again and again, until Ctrl-C."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
import time
from collections.abc import Callable

from hpctrain.cli import end_echoed_line
from hpctrain.errors import ExitCode
from hpctrain.phrases import counted, local_time
from hpctrain.terminal import can_redraw, unguarded, visible

WATCH_S = 5.0
"""Seconds between two tables."""
_CLEAR = "\x1b[H\x1b[J"


def show_repeatedly(show: Callable[[], None], every_s: float) -> int:
    """Show something every few seconds; on a terminal in the same place, and otherwise one after the other.

    Args:
        show: prints it.
        every_s: seconds from the end of one to the begin of the next.

    Returns:
        0, once the user types Ctrl-C.
    """
    try:
        while True:
            if can_redraw(sys.stdout):
                _redraw(show)
            else:
                print(local_time(time.time()))
                show()
                print(flush=True)
            time.sleep(every_s)
    except KeyboardInterrupt:  # the usual way to stop
        end_echoed_line()
    return ExitCode.FINISHED


def _redraw(show: Callable[[], None]) -> None:
    """Print on a cleared screen what fits on it, all at once, so that nothing flickers."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        show()
    size = shutil.get_terminal_size()
    lines = [f"{local_time(time.time())}  (Ctrl-C ends)", *printed.getvalue().splitlines()]
    if len(lines) > size.lines - 1:
        hidden = len(lines) - size.lines + 2
        lines = [*lines[: size.lines - 2], f"... {counted(hidden, 'more line')}"]
    stream = unguarded(sys.stdout)
    stream.write(_CLEAR + "\n".join(_cut(visible(line), size.columns) for line in lines) + "\n")
    stream.flush()


def _cut(line: str, columns: int) -> str:
    return line if len(line) <= columns else line[: columns - 3] + "..."

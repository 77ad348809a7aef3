"""The terminal as a screen: lines cut to its width, and output that is drawn again and again until Ctrl-C."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
import time
from collections.abc import Callable, Sequence

from hpctrain.cli import end_echoed_line
from hpctrain.errors import ExitCode
from hpctrain.phrases import counted, local_time
from hpctrain.terminal import can_redraw, is_terminal, unguarded, visible

WATCH_S = 5.0
"""Seconds between two tables."""
_CLEAR = "\x1b[H\x1b[J"


def cut_to_width(lines: Sequence[str]) -> list[str]:
    """Lines cut to the width of the terminal; as they are if standard output isn't one."""
    if not is_terminal(sys.stdout):
        return list(lines)
    columns = shutil.get_terminal_size().columns
    return [line if len(line) <= columns else f"{line[: columns - 3]}..." for line in lines]


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
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        show()
    height = shutil.get_terminal_size().lines
    lines = [f"{local_time(time.time())}  (Ctrl-C ends)", *map(visible, output.getvalue().splitlines())]
    if len(lines) > height - 1:
        hidden = len(lines) - height + 2
        lines = [*lines[: height - 2], f"... {counted(hidden, 'more line')}"]
    stream = unguarded(sys.stdout)
    stream.write(_CLEAR + "\n".join(cut_to_width(lines)) + "\n")
    stream.flush()

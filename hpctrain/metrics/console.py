"""Progress on the terminal."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from hpctrain.phrases import local_time
from hpctrain.run.evaluation import is_evaluation
from hpctrain.terminal import visible

logger = logging.getLogger(__name__)

_CLEAR_LINE = "\r\x1b[K"
_REDRAW_S = 0.05
_LINE_S = 1.0
_OWN_PLACE = ("train/epoch", "train/lr")
"""Metrics that the line shows in another place, or omits."""
_OF_THE_MACHINE = ("throughput/", "memory/")
"""Prefixes of metrics that the line omits, except for the speed."""


class ConsoleSink:
    """Shows progress in one line that is updated in place on a terminal; elsewhere in at most one plain line a second.

    Lines with an evaluation are always printed, and stay on the terminal.

    ``step 120/460  epoch 2  train/loss 0.123  5210 samples/s  eta 0:12``

    If the stream fails (a closed pipe, a full disk), the display ends, but training continues.

    Args:
        stream: where to write; a terminal is recognised.
        total_steps: the last step of the run.
        step: steps completed before this attempt.
        stamped: begin plain lines with date and time, as in a log.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        stream: TextIO,
        total_steps: int,
        step: int = 0,
        *,
        stamped: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._total_steps = total_steps
        self._start_step = step
        self._start_time = clock()
        self._clock = clock
        self._stamped = stamped
        self._drawn_at = float("-inf")
        self._open_line = ""
        self._gone = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show a step."""
        now = self._clock()
        evaluated = is_evaluation(values)
        pause_s = _REDRAW_S if self._terminal else _LINE_S
        if not evaluated and now - self._drawn_at < pause_s and step != self._total_steps:
            return
        self._drawn_at = now
        line = visible("  ".join([*self._parts(step, values), *([] if evaluated else self._eta(step, now))]))
        if not self._terminal:
            self._put(f"{local_time(time.time())} {line}\n" if self._stamped else f"{line}\n")
        elif evaluated:
            self._put(f"{_CLEAR_LINE}{line}\n")
            self._open_line = ""
        else:
            self._open_line = line[: self._columns() - 1]
            self._put(_CLEAR_LINE + self._open_line)

    def flush(self) -> None:
        """Do nothing: every line is written at once."""

    def close(self) -> None:
        """End the last progress line."""
        if self._open_line:
            # drawn again, since the terminal may have echoed ^C at its end
            self._put(f"{_CLEAR_LINE}{self._open_line}\n")
            self._open_line = ""

    def make_room(self, _record: logging.LogRecord) -> bool:
        """End the progress line before something else is logged; as a filter of logging, let the record pass."""
        self.close()
        return True

    def _parts(self, step: int, values: Mapping[str, float]) -> list[str]:
        parts = [f"step {step}/{self._total_steps}"]
        if "train/epoch" in values:
            parts.append(f"epoch {int(values['train/epoch'])}")
        shown = {name for name in values if name not in _OWN_PLACE and not name.startswith(_OF_THE_MACHINE)}
        parts += [f"{name} {value:.4g}" for name, value in values.items() if name in shown]
        if (speed := values.get("throughput/samples_per_s")) is not None:
            parts.append(f"{speed:.0f} samples/s" if speed >= 10 else f"{speed:.2g} samples/s")
        return parts

    def _eta(self, step: int, now: float) -> list[str]:
        done, seconds = step - self._start_step, now - self._start_time
        if done <= 0 or step >= self._total_steps:
            return []
        return [f"eta {duration((self._total_steps - step) * seconds / done)}"]

    def _columns(self) -> int:
        # queried for each line, since windows change; a longer line would wrap, and "\r" would not reach its start
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except OSError:
            return 80

    def _put(self, text: str) -> None:
        if self._gone:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            self._gone = True
            logger.warning("can't show progress any longer (%s); training continues", error.strerror)


def duration(seconds: float) -> str:
    """Seconds as ``0:12``, ``1:02:03`` or ``3d 04:05``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"

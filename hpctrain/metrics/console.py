"""Progress in plain lines, on a stream for as long as it can be written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from hpctrain.errors import error_text
from hpctrain.phrases import local_time
from hpctrain.run.evaluation import is_evaluation
from hpctrain.terminal import encodable, visible

logger = logging.getLogger(__name__)


class Display:
    """Writes to a stream until that fails (a closed pipe, a full disk): the display ends then, training continues.

    Args:
        stream: where to write; characters that its encoding lacks are escaped.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._failed = False

    def put(self, text: str) -> None:
        """Write a text at once."""
        if self._failed:
            return
        try:
            self._stream.write(encodable(text, self._stream))
            self._stream.flush()
        except Exception as error:  # standard output may be an object of the user's program, and raise anything
            self._failed = True
            logger.warning("can no longer show progress (%s); training continues", error_text(error))


MOST_METRICS = 12
"""Metrics of the task in a line; metrics.jsonl has all."""
_LINE_S = 1.0
_OWN_PLACE = ("train/epoch", "train/lr")
"""Metrics that the line shows in another place, or omits."""
_OF_THE_MACHINE = ("throughput/", "memory/")
"""Prefixes of metrics that the line omits, except for the speed."""


class ConsoleSink:
    """Prints progress in at most one line a second, and every evaluation.

    ``step 120/460  epoch 2  train/loss 0.123  5210 samples/s  eta 0:12``

    If the stream fails (a closed pipe, a full disk), the display ends, but training continues.

    Args:
        stream: where to write.
        total_steps: the last step of the run.
        step: steps completed before this attempt.
        stamped: begin lines with date and time, as in a log.
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
        self._total_steps = total_steps
        self._start_step = step
        self._start_time = clock()
        self._clock = clock
        self._stamped = stamped
        self._printed_at = float("-inf")
        self._display = Display(stream)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Print a step."""
        now = self._clock()
        evaluated = is_evaluation(values)
        if not evaluated and now - self._printed_at < _LINE_S and step != self._total_steps:
            return
        self._printed_at = now
        line = log_line(step, self._total_steps, values)
        done, seconds = step - self._start_step, now - self._start_time
        if not evaluated and done > 0 and step < self._total_steps:
            line += f"  eta {duration((self._total_steps - step) * seconds / done)}"
        line = visible(line)
        self._display.put(f"{local_time(time.time())} {line}\n" if self._stamped else f"{line}\n")

    def flush(self) -> None:
        """Do nothing: every line is written at once."""

    def close(self) -> None:
        """Do nothing: every line is complete."""


def log_line(step: int, total_steps: int, values: Mapping[str, float]) -> str:
    """Return a line of a log."""
    return "  ".join([f"step {step}/{total_steps}", *epoch(values), *own_metrics(values), *speed(values)])


def epoch(values: Mapping[str, float]) -> list[str]:
    """Return the words for the epoch, if it is known."""
    return [f"epoch {int(values['train/epoch'])}"] if "train/epoch" in values else []


def own_metrics(values: Mapping[str, float]) -> list[str]:
    """Return the words for the metrics of the task; if there are too many, for the loss and some others."""
    shown = [name for name in values if name not in _OWN_PLACE and not name.startswith(_OF_THE_MACHINE)]
    left_out = len(shown) - MOST_METRICS
    if left_out > 0:
        # a task may log the norm of each weight
        shown = sorted(shown, key=lambda name: not name.endswith("/loss"))[:MOST_METRICS]
    words = [f"{name} {values[name]:.4g}" for name in shown]
    return [*words, f"and {left_out} more"] if left_out > 0 else words


def speed(values: Mapping[str, float]) -> list[str]:
    """Return the words for the samples per second, if they are known."""
    found = values.get("throughput/samples_per_s")
    if found is None:
        return []
    return [f"{found:.0f} samples/s" if found >= 10 else f"{found:.2g} samples/s"]


def duration(seconds: float) -> str:
    """Seconds as ``0:12``, ``1:02:03`` or ``3d 04:05``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"

"""The progress of a training: plain lines, or a bar on a terminal that others print on as well."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO, cast

from hpctrain.errors import error_text
from hpctrain.phrases import local_time
from hpctrain.run.evaluation import is_evaluation
from hpctrain.terminal import can_redraw, encodable, is_terminal, visible

logger = logging.getLogger(__name__)

MOST_METRICS = 12
"""Metrics of the task in a line; metrics.jsonl has all."""
_LINE_S = 1.0
_SHOWN_ELSEWHERE = ("train/epoch", "train/lr")
"""Metrics that the line shows in another place, or omits."""
_MACHINE_PREFIXES = ("throughput/", "memory/")
"""Prefixes of metrics that the line omits, except for the speed."""
CLEAR_LINE = "\r\x1b[K"
REDRAW_S = 0.05
SHOWN_AFTER_S = 0.5
"""Seconds that something takes before a bar shows how far it is: most evaluations of small runs are over by then."""
GB = 1e9


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


class _RemainingTime:
    """Estimate of the time until a training ends, at the speed of this attempt so far."""

    def __init__(self, total_steps: int, step: int, clock: Callable[[], float]) -> None:
        self._total_steps = total_steps
        self._start_step = step
        self._start_s = clock()
        self._clock = clock

    def eta(self, step: int) -> list[str]:
        """Return the words for the estimate; none at the first step and at the last."""
        done = step - self._start_step
        left_s = (self._total_steps - step) * (self._clock() - self._start_s) / done if done > 0 else 0
        return [f"eta {duration(left_s)}"] if left_s > 0 else []


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
        self._pace = _RemainingTime(total_steps, step, clock)
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
        eta = [] if evaluated else self._pace.eta(step)
        line = "  ".join([log_line(step, self._total_steps, values), *eta])
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
    names = [name for name in values if name not in _SHOWN_ELSEWHERE and not name.startswith(_MACHINE_PREFIXES)]
    left_out = len(names) - MOST_METRICS
    if left_out > 0:
        # a task may log the norm of each weight
        names = sorted(names, key=lambda name: not name.endswith("/loss"))[:MOST_METRICS]
    words = [f"{name} {values[name]:.4g}" for name in names]
    return [*words, f"and {left_out} more"] if left_out > 0 else words


def speed(values: Mapping[str, float]) -> list[str]:
    """Return the words for the samples per second, if they are known."""
    rate = values.get("throughput/samples_per_s")
    if rate is None:
        return []
    return [f"{rate:.0f} samples/s" if rate >= 10 else f"{rate:.2g} samples/s"]


def duration(seconds: float) -> str:
    """Seconds as ``0:12``, ``1:02:03`` or ``3d 04:05``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class SharedStream:
    """A text stream that announces what is written to it; otherwise like the stream that it wraps.

    Args:
        stream: such as standard output.
        announce: called with each text before it is written.
    """

    def __init__(self, stream: TextIO, announce: Callable[[str], object]) -> None:
        self._stream = stream
        self._announce = announce

    def write(self, text: str) -> int:
        """Announce the text, and write it."""
        self._announce(text)
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Announce and write each text."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def output_announced(announce: Callable[[str], object]) -> Iterator[None]:
    """Context manager that announces what is printed, as far as standard output and error are terminals."""
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    shared = {name: SharedStream(stream, announce) for name, stream in streams.items() if is_terminal(stream)}
    for name, stream in shared.items():
        setattr(sys, name, cast(TextIO, stream))
    try:
        yield
    finally:
        for name, stream in shared.items():
            if getattr(sys, name) is stream:  # a stream that a task has put there since then is the task's
                setattr(sys, name, streams[name])


def terminal_handlers() -> list[logging.Handler]:
    """The handlers of all loggers that write to a terminal; they keep the stream that they were made with."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    streaming = [handler for handler in handlers if isinstance(handler, logging.StreamHandler)]
    return [handler for handler in streaming if is_terminal(handler.stream)]


class Bar:
    """One line of a terminal that is drawn again and again; tqdm formats it.

    tqdm's own bar knows neither log lines nor a stream that fails. torch imports tqdm anyway; rich would be one more
    import of each rank.

    If the stream fails (a closed pipe, a full disk), the display ends, but training continues. Other threads may draw
    as well.

    Args:
        stream: usually a terminal.
        clock: monotonic seconds.
    """

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        # only where a bar is drawn
        from tqdm.std import tqdm

        self._format = tqdm.format_meter
        self._stream = stream
        self._clock = clock
        self._is_ascii = not _shows_blocks(stream)
        self._process = os.getpid()
        # reentrant: if the stream fails, that is logged while the lock is held, and logging makes room
        self._lock = threading.RLock()
        self._drawn_at = float("-inf")
        self._open_line = ""
        self._is_drawn = False
        self._is_foreign_line_open = False
        self._work = ""
        self._work_done = 0.0
        self._work_began = 0.0
        self._display = Display(stream)

    @property
    def is_due(self) -> bool:
        """Whether the line is old enough to be drawn again."""
        return self._clock() - self._drawn_at >= REDRAW_S

    def draw(self, label: str, done: float, total: float | None, words: Iterable[str] = ()) -> None:
        """Draw the line.

        Args:
            label: what is done.
            done: how much of it.
            total: all of it; None if that is unknown.
            words: after the bar, as many as the line has room for.
        """
        with self._lock:
            self._work = ""
            self._draw(label, done, total, words)

    def show(self, work: str, done: float, total: float | None, *, in_gb: bool = False) -> None:
        """Show how far something is that interrupts the training, if it takes long; not more often than necessary.

        Args:
            work: what is done; of one piece of work, `done` grows from call to call.
            done: how much of it.
            total: all of it; None if that is unknown.
            in_gb: whether these are bytes.
        """
        with self._lock:
            now = self._clock()
            if work != self._work or done < self._work_done:
                self._work = work
                self._work_began = now
            self._work_done = done
            if now - self._work_began < SHOWN_AFTER_S or now - self._drawn_at < REDRAW_S:
                return
            if in_gb:
                amount = f"{done / GB:.1f} GB" if total is None else f"{done / GB:.1f}/{total / GB:.1f} GB"
            else:
                amount = f"{done:.0f}" if total is None else f"{done:.0f}/{total:.0f}"
            eta_s = 0.0 if total is None or not done else (now - self._work_began) * (total - done) / done
            self._draw(f"{work} {amount}", done, total, [f"eta {duration(eta_s)}"] if eta_s else [])

    def print_line(self, line: str) -> None:
        """Print a line that stays."""
        with self._lock:
            self._put_on_own_line(f"{visible(line)}\n")
            self._open_line = ""
            self._is_drawn = False

    def close(self) -> None:
        """End the line: that of the training stays."""
        with self._lock:
            if not self._open_line:
                return
            # drawn again, since the terminal may have echoed ^C at its end
            self._put_on_own_line("" if self._work else f"{self._open_line}\n")
            self._open_line = ""
            self._is_drawn = False

    def make_room(self, _record: logging.LogRecord) -> bool:
        """End the line before something else is logged; as a filter of logging, let the record pass."""
        # a DataLoader worker has a copy of the handlers and of this object, but its line isn't its own
        if os.getpid() == self._process:
            self.close()
        return True

    def announce(self, text: str) -> None:
        """Make room for a text that something else prints on the terminal; the line is drawn again below it."""
        if os.getpid() != self._process or not text:
            return
        with self._lock:
            # another bar, such as tqdm's, draws over this line, and this one over that bar
            if self._is_drawn and not text.startswith("\r"):
                self._display.put(CLEAR_LINE)
                self._is_drawn = False
            self._is_foreign_line_open = not text.endswith("\n") and "\r" not in text.rpartition("\n")[2]

    @contextmanager
    def sharing_terminal(self, handlers: list[logging.Handler]) -> Iterator[None]:
        """In the context, make room for what others print on terminals; end the line afterwards.

        Args:
            handlers: make room for what these print as well, wherever that is.
        """
        all_handlers = {*handlers, *terminal_handlers()}
        for handler in all_handlers:
            handler.addFilter(self.make_room)
        try:
            with output_announced(self.announce):
                yield
        finally:
            self.close()
            for handler in all_handlers:
                handler.removeFilter(self.make_room)

    def _draw(self, label: str, done: float, total: float | None, words: Iterable[str]) -> None:
        columns = self._columns() - 1
        width = 20 if columns >= 100 else 10
        bar_format = f"{{desc}} {{percentage:3.0f}}%|{{bar:{width}}}|" if total else "{desc}"
        line: str = self._format(
            done, total, 0, ncols=columns, ascii=self._is_ascii, bar_format=bar_format, prefix=visible(label)
        )
        for word in map(visible, words):
            # not cut off in the middle of a number
            if len(line) + 2 + len(word) > columns:
                break
            line += f"  {word}"
        self._drawn_at = self._clock()
        self._open_line = line[:columns]
        self._put_on_own_line(self._open_line)
        self._is_drawn = True

    def _put_on_own_line(self, text: str) -> None:
        # what a task printed without a line's end stays
        self._display.put(f"\n{CLEAR_LINE}{text}" if self._is_foreign_line_open else f"{CLEAR_LINE}{text}")
        self._is_foreign_line_open = False

    def _columns(self) -> int:
        # queried for each line, since windows change; a longer line would wrap, and "\r" would not reach its start
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (AttributeError, OSError, ValueError):  # not a file, or closed
            return 80


class BarSink:
    """Shows the training's progress in a bar; lines with an evaluation stay on the terminal.

    ``step 120/460  26%|██▌       |  eta 0:12  epoch 2  5210 samples/s  train/loss 0.123``

    Args:
        bar: shared with what interrupts the training.
        total_steps: the last step of the run.
        step: steps completed before this attempt.
        clock: monotonic seconds.
    """

    def __init__(
        self, bar: Bar, total_steps: int, step: int = 0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bar = bar
        self._total_steps = total_steps
        self._pace = _RemainingTime(total_steps, step, clock)
        self._words: list[str] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show a step with its metrics."""
        if is_evaluation(values):
            self._bar.print_line(log_line(step, self._total_steps, values))
            return
        # the metrics last, for which a narrow terminal may have no room
        self._words = [*epoch(values), *speed(values), *own_metrics(values)]
        self.show_step(step)

    def show_step(self, step: int) -> None:
        """Show a step with the metrics that were logged last, unless the line is new; called after each step."""
        if self._bar.is_due or step == self._total_steps:
            words = self._pace.eta(step) + self._words
            self._bar.draw(f"step {step}/{self._total_steps}", step, self._total_steps, words)

    def flush(self) -> None:
        """Do nothing: every line is written at once."""

    def close(self) -> None:
        """End the line."""
        self._bar.close()


def open_bar(progress: str, stream: TextIO, *, is_log: bool) -> Bar | None:
    """Return a bar, or None for plain lines.

    Args:
        progress: `trainer.progress`.
        stream: standard output.
        is_log: whether it goes into the run's log.
    """
    if is_log or progress == "lines" or (progress == "auto" and not can_redraw(stream)):
        return None
    return Bar(stream)


def _shows_blocks(stream: TextIO) -> bool:
    try:
        "█".encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True

"""The screen of one run: its curve, its attempts and its log, read as they grow."""

from __future__ import annotations

import itertools
import re
import time
from collections import deque
from pathlib import Path
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, RichLog, Static

from hpctrain.files import describe_os_error
from hpctrain.phrases import listed
from hpctrain.run.growing_file import NOTHING, GrowingFile, start_of_last_lines
from hpctrain.run.manifest import varied_text
from hpctrain.status.follow import log_to_show
from hpctrain.status.run_details import attempts_table, progress_text
from hpctrain.terminal import visible
from hpctrain.top.columns import PROGRESS, TableView, best_text, number_text
from hpctrain.top.curve import plot
from hpctrain.top.messages import fitted, plain
from hpctrain.top.watch import WatchedRun

CURVE_BYTES = 16 * 2**20
"""Bytes at the end of metrics.jsonl from which the curves are drawn."""
LOG_LINES = 500
"""Lines of the log that are kept."""
LONGEST_LINE_BYTES = 2**16
"""Bytes of the end of a longer line that are shown: a file of zeros is one line."""
CHUNKS = 64
"""Reads of a log in one update."""
_COLOURS = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")
WIDE = 140
"""Columns from which the log and the attempts are shown next to each other."""


class OpenRun:
    """A run whose details are read.

    Args:
        run: as it is watched.

    Attributes:
        lacks_best: whether the run has ended, and the checkpoint of its best evaluation isn't on disk.
        log_path: of the log; None before there is one.
        log: its last lines.
        log_version: changes with the log.
    """

    def __init__(self, run: WatchedRun) -> None:
        self.run = run
        self.lacks_best = False
        self.log_path: Path | None = None
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self.log_version = 0
        self._log_file: GrowingFile | None = None
        self._torn = b""

    def update(self) -> None:
        """Read what is new."""
        status = self.run.status
        step = None if status.state.may_change else status.best_step
        self.lacks_best = step is not None and not self.run.directory.checkpoint(step).exists()
        self.run.lengthen_curves(CURVE_BYTES)
        try:
            self._read_log()
        except OSError as error:
            self._log_file = None
            note = visible(f"the log can't be read: {describe_os_error(error)}")
            if not self.log or self.log[-1] != note:
                self.log.append(note)
                self.log_version += 1

    def _read_log(self) -> None:
        path = log_to_show(self.run.directory, None)
        if path is None:
            return
        if self._log_file is None or path != self.log_path:
            self.log_path = path
            self.log.clear()
            self.log_version += 1
            self._torn = b""
            self._log_file = GrowingFile(path, start_of_last_lines(path, LOG_LINES))
        # a log that grows faster than it is read is read on at the next update
        for appended in itertools.islice(iter(self._log_file.read, NOTHING), CHUNKS):
            *lines, torn = (self._torn + appended.data).split(b"\n")
            self._torn = torn[-LONGEST_LINE_BYTES:]
            self.log.extend(map(_plain, lines[-LOG_LINES:]))
            self.log_version += 1


def _plain(line: bytes) -> str:
    """A line of a log without its colours, and with only the last state of a progress bar."""
    text = _COLOURS.sub("", line[-LONGEST_LINE_BYTES:].decode(errors="replace").rstrip("\r"))
    return visible(text.rpartition("\r")[2].expandtabs())


class RunScreen(Screen[None]):
    """One run.

    Args:
        opened: the run.
        metric: whose curve is shown first.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace", "dismiss", "Back", key_display="Esc"),
        Binding("m", "metric(1)", "Metric"),
        Binding("M", "metric(-1)", "Metric before", show=False),
        Binding("a", "attempts", "Attempts/log"),
    ]

    def __init__(self, opened: OpenRun, metric: str) -> None:
        super().__init__()
        self.opened = opened
        self._metric = metric
        self._log_version = -1
        self._shows_attempts = False

    def compose(self) -> ComposeResult:
        """Make the screen."""
        yield Static(id="about")
        yield Static(id="curve")
        with Horizontal(id="below"):
            yield RichLog(id="log", max_lines=500, min_width=1)
            with VerticalScroll(id="attempts"):
                yield Static(id="attempt_lines")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Show the log first."""
        self._arrange()
        self.query_one(RichLog).focus()

    def on_resize(self, _: events.Resize) -> None:
        """Draw in the new size."""
        self._arrange()
        self.call_after_refresh(self.show_run)

    def _arrange(self) -> None:
        wide = self.size.width >= WIDE
        self.query_one("#log").display = wide or not self._shows_attempts
        self.query_one("#attempts").display = wide or self._shows_attempts

    def show_run(self) -> None:
        """Show the run as it was at the last update."""
        status = self.opened.run.status
        self.query_one("#about", Static).update(plain("\n".join(self._about())))
        head, *attempts = attempts_table(status, time.time())
        newest_first = "\n".join([head, *reversed(attempts)]) if attempts else "no attempt has begun"
        self.query_one("#attempt_lines", Static).update(plain(newest_first))
        self._draw_curve()
        self._show_log()

    def _about(self) -> list[str]:
        run = self.opened.run
        status = run.status
        varied = f"   {varied_text(status.varied)}" if status.varied else ""
        step = f"step {progress_text(status)}" if status.knows_step else "it reports no steps"
        best = f"   best {best_text(status.best)} at step {status.best_step}" if status.best else ""
        best += " (its checkpoint isn't on disk)" if self.opened.lacks_best else ""
        nodes = status.attempts[-1].nodes if status.attempts else ()
        jobs = f"   job {listed(status.job_ids)}" if status.job_ids else ""
        bar = PROGRESS.text(run, TableView("", time.time())) if status.total_steps else ""
        return [
            f"{run.directory.path}{varied}",
            status.described,
            f"{bar}   {step}{best}{jobs}{f'   on {listed(nodes)}' if nodes else ''}".strip(),
        ]

    def _draw_curve(self) -> None:
        curves = self.opened.run.curves.by_name
        names = sorted(curves)
        widget = self.query_one("#curve", Static)
        if not names:
            widget.update("no metric has been logged yet")
            return
        if self._metric not in names:
            self._metric = names[0]
        value = number_text(self.opened.run.status.metrics.get(self._metric))
        suffix = f" {value}   ({names.index(self._metric) + 1} of {len(names)}: m)"
        width = max(20, widget.size.width)
        title = fitted(self._metric, max(1, width - len(suffix)), keep_end=True).rstrip()
        lines = plot(curves[self._metric].points(), width, max(4, widget.size.height - 1))
        widget.update(plain("\n".join([title + suffix, *lines])))

    def _show_log(self) -> None:
        if self.opened.log_version == self._log_version:
            return
        widget = self.query_one(RichLog)
        self._log_version = self.opened.log_version
        follow = widget.is_vertical_scroll_end
        widget.clear()
        widget.write("\n".join(list(self.opened.log)), scroll_end=follow)
        widget.border_title = plain("log" if self.opened.log_path is None else self.opened.log_path.name)

    def action_metric(self, places: int) -> None:
        """Show another metric."""
        names = sorted(self.opened.run.curves.by_name)
        if names:
            place = names.index(self._metric) + places if self._metric in names else 0
            self._metric = names[place % len(names)]
            self._draw_curve()

    def action_attempts(self) -> None:
        """Change between the log and the attempts."""
        self._shows_attempts = not self._shows_attempts
        self._arrange()
        # the arrows scroll what has the focus
        self.query_one("#attempts" if self._shows_attempts else "#log").focus()

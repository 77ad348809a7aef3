"""The table of runs: a widget that draws only the lines in sight."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from hpctrain.status.state import RunState
from hpctrain.terminal import visible
from hpctrain.top.columns import COLUMNS, METRIC, RUN, STATE, TREND_COLUMN, Column, Shown
from hpctrain.top.layout import gap, widths
from hpctrain.top.watched_run import WatchedRun

_HEAD = Style(bold=True, underline=True)
_CHOSEN = Style(reverse=True)
_COLOURS = {
    RunState.RUNNING: Style(color="green"),
    RunState.STARTING: Style(color="green"),
    RunState.FAILED: Style(color="red", bold=True),
    RunState.UNREADABLE: Style(color="red"),
    RunState.INTERRUPTED: Style(color="yellow"),
    RunState.HELD: Style(color="yellow"),
    RunState.QUEUED: Style(color="blue"),
}
"""Colours repeat what the words say."""
_BY_TITLE = {column.title: column for column in COLUMNS}


class RunTable(Widget, can_focus=True):
    """Rows of runs, one of which is chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown,space", "page(1)", show=False),
        Binding("home,g", "move(-1000000000)", show=False),
        Binding("end,G", "move(1000000000)", show=False),
        Binding("enter", "open", "Open"),
    ]

    class Chosen(Message):
        """Another run is chosen, or its status has changed."""

    class Opened(Message):
        """The user opens the chosen run."""

    def __init__(self) -> None:
        super().__init__(id="runs")
        self.rows: Sequence[WatchedRun] = ()
        self._shown = Shown(metric="", now=0.0)
        self._sorted: Column | None = None
        self._descending = False
        self._chosen: Path | None = None
        self._cursor = 0
        self._top = 0
        self._widths: dict[str, int] = {}

    @property
    def chosen(self) -> WatchedRun | None:
        """The chosen run; None without rows."""
        return self.rows[self._cursor] if self.rows else None

    def show(self, rows: Sequence[WatchedRun], shown: Shown, by: Column | None, *, descending: bool) -> None:
        """Show these rows; the run that was chosen stays so."""
        self.rows = rows
        self._shown = shown
        self._sorted = by
        self._descending = descending
        places = (place for place, run in enumerate(rows) if run.directory.path == self._chosen)
        self._cursor = next(places, min(self._cursor, max(0, len(rows) - 1)))
        self._fit()
        self._keep_in_sight()

    def on_resize(self, _: events.Resize) -> None:
        """Choose the columns anew."""
        self._fit()
        self._keep_in_sight()

    def _fit(self) -> None:
        # the widths depend on all rows, so that columns don't jump while the user scrolls
        elastic = [column for column in COLUMNS if not column.width]
        needed = {
            column.title: max((len(column.text(run, self._shown)) for run in self.rows), default=0)
            for column in elastic
        }
        if not any(run.status.varied for run in self.rows):
            needed["VARIED"] = 0
        self._widths = widths(self.size.width, needed)

    def action_move(self, rows: int) -> None:
        """Choose another run."""
        self._choose(self._cursor + rows)

    def action_page(self, pages: int) -> None:
        """Choose the run a screen further."""
        self._choose(self._cursor + pages * max(1, self.size.height - 2))

    def action_open(self) -> None:
        """Open the chosen run."""
        if self.chosen is not None:
            self.post_message(self.Opened())

    def on_click(self, event: events.Click) -> None:
        """Choose the run of a line; choose it again to open it."""
        place = self._top + event.y - 1
        if event.y < 1 or place >= len(self.rows):
            return
        again = place == self._cursor
        self._choose(place)
        if again:
            self.action_open()

    def on_mouse_scroll_down(self, _: events.MouseScrollDown) -> None:
        """Choose a later run."""
        self._choose(self._cursor + 3)

    def on_mouse_scroll_up(self, _: events.MouseScrollUp) -> None:
        """Choose an earlier run."""
        self._choose(self._cursor - 3)

    def _choose(self, place: int) -> None:
        self._cursor = max(0, min(place, len(self.rows) - 1))
        self._keep_in_sight()

    def _keep_in_sight(self) -> None:
        lines = max(1, self.size.height - 1)
        self._top = max(0, min(self._top, self._cursor, len(self.rows) - lines), self._cursor - lines + 1)
        self._chosen = None if self.chosen is None else self.chosen.directory.path
        self.refresh()
        self.post_message(self.Chosen())

    def render_line(self, y: int) -> Strip:
        """Draw one line."""
        width = self.size.width
        if y == 0:
            return Strip([Segment(self._head(), _HEAD)]).adjust_cell_length(width, _HEAD)
        place = self._top + y - 1
        if place >= len(self.rows):
            return Strip.blank(width, self.rich_style)
        run = self.rows[place]
        chosen = _CHOSEN if place == self._cursor else Style()
        segments: list[Segment] = []
        for title, cells in self._widths.items():
            column = _BY_TITLE[title]
            coloured = column in (STATE, TREND_COLUMN) and place != self._cursor
            style = _COLOURS.get(run.status.state, Style()) if coloured else Style()
            text = fitted(column.text(run, self._shown), cells, right=column.right, keep_end=column is RUN)
            segments += [Segment(text, style + chosen), Segment(" " * gap(width), chosen)]
        return Strip(segments).adjust_cell_length(width, chosen).apply_style(self.rich_style)

    def _head(self) -> str:
        titles = []
        for title, cells in self._widths.items():
            column = _BY_TITLE[title]
            name = (self._shown.metric or title) if column is METRIC else title
            mark = "" if column is not self._sorted else "▼" if self._descending else "▲"
            text = fitted(name, cells - len(mark), right=column.right, keep_end=True)
            titles.append(fitted(text.rstrip() + mark, cells) if mark and not column.right else text + mark)
        return (" " * gap(self.size.width)).join(titles)


def fitted(text: str, cells: int, *, right: bool = False, keep_end: bool = False) -> str:
    """A text in exactly this many cells of the terminal, cut with an ellipsis if it is too long.

    Args:
        text: may have control characters, which are escaped.
        cells: of the terminal; some characters take two.
        right: whether it is aligned to the right.
        keep_end: whether the beginning is cut, and not the end.
    """
    # few characters take no cell: of a text of millions, only these can be in sight
    text = text[-(4 * cells + 100) :] if keep_end else text[: 4 * cells + 100]
    text = visible(" ".join(text.split("\n")))
    length = cell_len(text)
    if length <= cells:
        return " " * (cells - length) + text if right else text + " " * (cells - length)
    if cells < 2:
        return set_cell_size(text, max(0, cells))
    if not keep_end:
        return set_cell_size(text, cells - 1) + "…"
    while cell_len(text) > cells - 1:
        text = text[1:]
    return set_cell_size("…" + text, cells)

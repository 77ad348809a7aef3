"""The screen of all runs, with a table that draws only the lines in sight."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Footer, Input, Static

from hpctrain.phrases import counted, duration
from hpctrain.run.manifest import varied_text
from hpctrain.status.state import RunState
from hpctrain.top.columns import (
    BEST,
    COLUMNS,
    METRIC,
    RUN,
    STATE,
    TREND_COLUMN,
    TableView,
    gap,
    in_order,
    matches,
    widths,
)
from hpctrain.top.messages import fitted, plain
from hpctrain.top.watch import Watch, WatchedRun

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
"""Colours of states, which the words name as well."""
_BY_TITLE = {column.title: column for column in COLUMNS}
FIRST_METRIC = "train/loss"
"""The metric that is shown at first, if a run has it."""
_SORTED_BY = (None, *(column for column in COLUMNS if column not in (TREND_COLUMN, BEST)))


class RunTable(Widget, can_focus=True):
    """Rows of runs, one of which is chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown,space", "page(1)", show=False),
        Binding("home,g", "move(-1000000000)", show=False),
        Binding("end,G", "move(1000000000)", show=False),
    ]

    class Chosen(Message):
        """Another run is chosen, or its status has changed."""

    def __init__(self) -> None:
        super().__init__(id="runs")
        self.rows: Sequence[WatchedRun] = ()
        self._view = TableView(metric="", now=0.0)
        self._chosen: Path | None = None
        self._cursor = 0
        self._top = 0
        self._widths: dict[str, int] = {}

    @property
    def chosen(self) -> WatchedRun | None:
        """The chosen run; None without rows."""
        return self.rows[self._cursor] if self.rows else None

    def show(self, runs: Sequence[WatchedRun], view: TableView) -> None:
        """Show these runs, sorted; the run that was chosen stays so."""
        self.rows = in_order(runs, view)
        self._view = view
        places = (place for place, run in enumerate(self.rows) if run.directory.path == self._chosen)
        self._cursor = next(places, min(self._cursor, max(0, len(self.rows) - 1)))
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
            column.title: max((len(column.text(run, self._view)) for run in self.rows), default=0) for column in elastic
        }
        if not any(run.status.varied for run in self.rows):
            needed["VARIED"] = 0
        self._widths = widths(self.size.width, needed)

    def action_move(self, rows: int) -> None:
        """Choose another run."""
        self._cursor = max(0, min(self._cursor + rows, len(self.rows) - 1))
        self._keep_in_sight()

    def action_page(self, pages: int) -> None:
        """Choose the run a screen further."""
        self.action_move(pages * max(1, self.size.height - 2))

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
            text = fitted(column.text(run, self._view), cells, right=column.right, keep_end=column is RUN)
            segments += [Segment(text, style + chosen), Segment(" " * gap(width), chosen)]
        return Strip(segments).adjust_cell_length(width, chosen).apply_style(self.rich_style)

    def _head(self) -> str:
        titles = []
        for title, cells in self._widths.items():
            column = _BY_TITLE[title]
            name = (self._view.metric or title) if column is METRIC else title
            mark = "" if column is not self._view.by else "▼" if self._view.descending else "▲"
            text = fitted(name, cells - len(mark), right=column.right, keep_end=True)
            titles.append(fitted(text.rstrip() + mark, cells) if mark and not column.right else text + mark)
        return (" " * gap(self.size.width)).join(titles)


class RunsScreen(Screen[None]):
    """All runs, sorted and filtered.

    Args:
        watch: the runs.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "Open"),
        Binding("s", "sort", "Sort"),
        Binding("S", "reverse", "Reverse", show=False),
        Binding("m", "metric(1)", "Metric"),
        Binding("M", "metric(-1)", "Metric before", show=False),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("escape", "all", "All", show=False),
    ]

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self._metric = ""
        self._place = 0
        self._descending = False
        self._words: list[str] = []

    def compose(self) -> ComposeResult:
        """Make the screen: a line on all runs, the table, three lines on the chosen run, the filter and the keys."""
        yield Static(id="summary")
        yield RunTable()
        yield Static(id="chosen")
        yield Input(id="filter", placeholder="words of a name, state, value, job, node or reason", compact=True)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begin with the table."""
        self.query_one("#filter").display = False
        self.query_one(RunTable).focus()
        self.show_runs()

    @property
    def chosen(self) -> WatchedRun | None:
        """The chosen run; None without one."""
        return self.query_one(RunTable).chosen

    def show_runs(self) -> None:
        """Show the runs as they were at the last update."""
        runs = self._watch.runs
        if not self._metric:
            names = self._metrics()
            self._metric = FIRST_METRIC if FIRST_METRIC in names else next(iter(names), "")
        rows = [run for run in runs if not self._words or matches(run, self._words)]
        view = TableView(self._metric, time.time(), _SORTED_BY[self._place], self._descending)
        self.query_one(RunTable).show(rows, view)
        self._summarise(len(rows))

    def _metrics(self) -> list[str]:
        return sorted({name for run in self._watch.runs for name in run.status.metrics})

    def _summarise(self, num_shown: int) -> None:
        runs = self._watch.runs
        problem = f"the folder can't be read: {self._watch.problem}" if self._watch.problem else ""
        root = str(self._watch.root)
        if not runs:
            text = f"{root}: {problem}" if problem else f"no runs under {root}/ yet; they appear here"
            self.query_one("#summary", Static).update(plain(text))
            return
        states = Counter(str(run.status.state) for run in runs)
        # a long path must not hide the states
        root = fitted(root, min(len(root), max(12, self.size.width // 5)), keep_end=True)
        parts = [f"{root}: {counted(len(runs), 'run')}", *filter(None, [problem])]
        parts.append(", ".join(f"{count} {state}" for state, count in states.most_common()))
        if self._words:
            parts.append(f"{num_shown} match {' '.join(self._words)!r} (Esc shows all)")
        by = _SORTED_BY[self._place]
        if by is not None:
            parts.append(f"by {by.title}")
        query = self._watch.query
        if query.silent:
            parts.append("SLURM doesn't answer")
        elif query.answered_at is not None:
            parts.append(f"SLURM {duration(time.monotonic() - query.answered_at)} ago")
        self.query_one("#summary", Static).update(plain(fitted("  ·  ".join(parts), max(1, self.size.width - 1))))

    def on_run_table_chosen(self) -> None:
        """Describe the chosen run in full: a narrow table has no room for its reason."""
        run = self.chosen
        lines = ["", ""]
        if run is not None:
            varied = f"  {varied_text(run.status.varied)}" if run.status.varied else ""
            jobs = f"  job {run.status.job_ids[-1]}" if run.status.job_ids else ""
            nodes = run.status.attempts[-1].nodes if run.status.attempts else ()
            where = f" on {', '.join(nodes)}" if nodes else ""
            lines = [f"{run.name}{varied}{jobs}{where}", run.status.described]
        width = max(1, self.size.width - 1)
        # the reason may take two lines
        self.query_one("#chosen", Static).update(plain("\n".join([fitted(lines[0], width).rstrip(), lines[1]])))

    def action_open(self) -> None:
        """Open the chosen run."""
        if self.chosen is not None:
            self.app.open_run(self.chosen, self._metric)  # type: ignore[attr-defined]

    def action_sort(self) -> None:
        """Sort by the next column that the table shows; after the last one, the newest first."""
        self._place = (self._place + 1) % len(_SORTED_BY)
        self.show_runs()

    def action_reverse(self) -> None:
        """Reverse the order."""
        self._descending = not self._descending
        self.show_runs()

    def action_metric(self, places: int) -> None:
        """Show another metric."""
        names = self._metrics()
        if names:
            place = names.index(self._metric) + places if self._metric in names else 0
            self._metric = names[place % len(names)]
            self.show_runs()

    def action_filter(self) -> None:
        """Ask for words that the runs must have."""
        field = self.query_one("#filter", Input)
        field.display = True
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while the user types."""
        self._words = event.value.casefold().split()
        self.show_runs()

    def on_input_submitted(self) -> None:
        """Keep the filter, and go back to the table."""
        self.query_one("#filter").display = bool(self._words)
        self.query_one(RunTable).focus()

    def action_all(self) -> None:
        """Show all runs again."""
        field = self.query_one("#filter", Input)
        field.value = ""
        field.display = False
        self.query_one(RunTable).focus()

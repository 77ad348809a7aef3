"""The screen of all runs."""

from __future__ import annotations

import time
from collections import Counter
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Footer, Input, Static

from hpctrain.phrases import counted, duration
from hpctrain.run.manifest import varied_text
from hpctrain.top.columns import BEST, COLUMNS, TREND_COLUMN, Shown, matches, sort_by
from hpctrain.top.messages import plain
from hpctrain.top.run_table import RunTable, fitted
from hpctrain.top.watch import Watch
from hpctrain.top.watched_run import WatchedRun

FIRST_METRIC = "train/loss"
"""The metric that is shown at first, if a run has it."""
_SORTED_BY = (None, *(column for column in COLUMNS if column not in (TREND_COLUMN, BEST)))


class RunsScreen(Screen[None]):
    """All runs, sorted and filtered.

    Args:
        watch: the runs.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "Sort"),
        Binding("S", "reverse", "Reverse", show=False),
        Binding("m", "metric(1)", "Metric"),
        Binding("M", "metric(-1)", "Metric before", show=False),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("escape", "all", "All", show=False),
        Binding("c", "app.cancel_run", "Cancel"),
        Binding("r", "app.resume_run", "Resume"),
        Binding("question_mark", "app.help", "Help", key_display="?"),
        Binding("q", "app.quit", "Quit"),
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
        """Show the runs as they were at the last look."""
        runs = self._watch.runs
        if not self._metric:
            known = self._metrics()
            self._metric = FIRST_METRIC if FIRST_METRIC in known else next(iter(known), "")
        shown = Shown(metric=self._metric, now=time.time())
        rows = [run for run in runs if matches(run, self._words)] if self._words else list(runs)
        by = _SORTED_BY[self._place]
        if by is not None:
            rows = sort_by(by, rows, shown, descending=self._descending)
        self.query_one(RunTable).show(rows, shown, by, descending=self._descending)
        self._summarise(len(rows))

    def _metrics(self) -> list[str]:
        return sorted({name for run in self._watch.runs for name in run.status.metrics})

    def _summarise(self, shown: int) -> None:
        runs = self._watch.runs
        problem = f"the folder can't be read: {self._watch.problem}" if self._watch.problem else ""
        if not runs:
            text = (
                f"{self._watch.root}: {problem}"
                if problem
                else f"no runs under {self._watch.root}/ yet; they appear here"
            )
            self.query_one("#summary", Static).update(plain(text))
            return
        states = Counter(str(run.status.state) for run in runs)
        root = str(self._watch.root)
        # a long path must not hide the states
        root = fitted(root, min(len(root), max(12, self.size.width // 5)), keep_end=True)
        parts = [f"{root}: {counted(len(runs), 'run')}", *filter(None, [problem])]
        parts.append(", ".join(f"{count} {state}" for state, count in states.most_common()))
        if self._words:
            parts.append(f"{shown} match {' '.join(self._words)!r} (Esc shows all)")
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

    def on_run_table_opened(self) -> None:
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

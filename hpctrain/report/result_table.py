"""The table of a sweep's results: a row per run, or per group of runs that differ in nothing but their seed."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from hpctrain.phrases import counted, duration, listed
from hpctrain.report.markup import Markup, element, joined
from hpctrain.report.page import folded, table
from hpctrain.report.sweep_results import SweepResults
from hpctrain.results.ranking import RankedRow, Ranking
from hpctrain.results.varied_keys import SEED
from hpctrain.run.manifest import value_text

SHOWN = 25
"""Rows that are open."""
MOST = 1000
MOST_CHARS = 60
"""Characters of a value in its cell."""


def result_table(record: SweepResults) -> Markup:
    """Make the table."""
    ranking = record.ranking
    over_seeds = any(len(row.runs) > 1 for row in ranking.rows)
    keys = [key for key in ranking.keys if not (over_seeds and key == SEED)]
    metric = "value" if ranking.metric is None else ranking.metric.name
    head = ["", *keys]
    head += [f"best {metric}", *(["\u00b1", "seeds"] if over_seeds else []), "last", "at step", "steps", "training"]
    head += ["state", "run"]
    numbers = [0, *range(1 + len(keys), len(head) - 2)]
    rows = [_cells(row, keys, record, over_seeds=over_seeds) for row in ranking.rows[:MOST]]
    parts = [table(head, rows[:SHOWN], numbers=numbers)]
    if more := rows[SHOWN:]:
        parts.append(folded(f"{counted(len(more), 'more row')}", table(head, more, numbers=numbers)))
    if (left_out := len(ranking.rows) - len(rows)) > 0:
        text = f"{counted(left_out, 'row')} after these not shown{_where_all(record)}"
        parts.append(element("p", text, class_="faint"))
    return joined(parts)


def _where_all(record: SweepResults) -> str:
    if record.ranking.metric is None:
        # without a metric, `best` refuses
        return ""
    return f"; all of them: python -m hpctrain best {shlex.quote(str(record.home))} --csv"


def _cells(row: RankedRow, keys: Sequence[str], record: SweepResults, *, over_seeds: bool) -> list[str]:
    spread = row.spread
    seeds = ["", str(len(row.runs))]
    if spread is not None and spread.deviation is not None:
        seeds[0] = f"{spread.deviation:.2g}"
    total = "" if row.total_steps is None else f"/{row.total_steps}"
    return [
        "" if row.rank is None else str(row.rank),
        *(_short(value_text(row.values[key])) if key in row.values else "-" for key in keys),
        "-" if row.best is None else f"{row.best:.5g}",
        *(seeds if over_seeds else []),
        "-" if row.last is None else f"{row.last:.5g}",
        "-" if row.best_step is None else str(row.best_step),
        f"{row.step}{total}",
        duration(row.seconds),
        row.state,
        listed((os.path.relpath(run.path, record.home) for run in row.directories), shown=6, separator=" "),
    ]


def _short(text: str) -> str:
    return text if len(text) <= MOST_CHARS else f"{text[: MOST_CHARS - 1]}\u2026"


def winner_text(ranking: Ranking) -> str:
    """The best value, and the values that gave it; empty without one."""
    winner = ranking.winner
    if winner is None or winner.best is None:
        return ""
    spread = winner.spread
    more = ""
    if spread is not None and spread.deviation is not None:
        more = f" \u00b1 {spread.deviation:.2g} over {spread.count} seeds"
    return f"{winner.best:.4g}{more}, with {winner.label}"

"""The page of a sweep, and the table of its results."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hpctrain.files import read_json_or_empty
from hpctrain.phrases import counted, duration, listed
from hpctrain.report.bar_rows import time_chart
from hpctrain.report.line_chart import Line, line_chart, number_text
from hpctrain.report.origin import code, configuration, environment, without_secrets
from hpctrain.report.page import Markup, descriptions, element, facts, folded, html_page, joined, remark, table
from hpctrain.report.sweep_charts import SweepResults, key_charts, parallel_coordinates, rung_chart
from hpctrain.results.ranking import RankedRow, Ranking
from hpctrain.results.run_result import SEED
from hpctrain.run.directory import RunDirectory
from hpctrain.run.manifest import value_text
from hpctrain.status.state import RunState

SEARCH = ("kind", "seed", "num_runs", "sampler", "min_steps", "reduction_factor")
"""Fields of sweep.json that the page shows; the overrides in others may hold secrets."""


def sweep_page(home: Path, directories: Sequence[RunDirectory]) -> str:
    """Return the page of a sweep, made from the directories of its runs, and from SLURM's records where it answers.

    Args:
        home: the folder of the runs.
        directories: of the runs, at least one.
    """
    record = SweepResults.read(home, directories)
    winner = record.ranking.rows[0].runs[0].directory
    of_which = "the best run" if record.ranking.winner is not None else winner.path.name
    programs = all(point.result.is_program for point in record.points)
    choose = "python -m hpctrain best takes --metric"
    unranked = remark(f"No metric ranks these runs: {record.why_unranked} ({choose}).") if record.why_unranked else ""
    sections = {
        "Results": joined([unranked, result_table(record)]),
        "Keys together": parallel_coordinates(record),
        "The metric over each key": key_charts(record),
        "Learning curves": _learning_curves(record),
        "Budget by rung": rung_chart(home),
        "Where the time of all runs went": time_chart(record.spent, with_ratio=not programs),
        f"Configuration of {of_which}": configuration(winner),
        f"Code of {of_which}": code(winner),
        f"Environment of {of_which}": environment(winner),
    }
    return html_page(f"{home.name}, a sweep", _head(record, with_ratio=not programs), sections)


def _head(record: SweepResults, *, with_ratio: bool) -> Markup:
    statuses = [point.result.status for point in record.points]
    states = Counter(str(status.state) for status in statuses)
    spent = record.spent
    search = read_json_or_empty(record.home / "sweep.json")
    search_pairs = [(name.replace("_", " "), str(search[name])) for name in SEARCH if search.get(name) is not None]
    space = search.get("space")
    if isinstance(space, dict):
        search_pairs += [(key, str(value)) for key, value in without_secrets(space).items()]
    pairs = [("runs", str(len(statuses)))]
    pairs += [(state, str(count)) for state, count in states.most_common()] if len(states) > 1 else []
    pairs.append(("steps, of all runs", number_text(sum(status.step for status in statuses))))
    pairs.append(("wall time, of all runs", duration(spent.total_s)))
    if with_ratio and spent.ratio is not None:
        pairs.append(("effective training time ratio", f"{spent.ratio:.2f}"))
    state = f"all {next(iter(states))}"
    if len(states) > 1:
        state = f"{states[str(RunState.COMPLETED)]} of {counted(len(statuses), 'run')} completed"
    heading = element("h1", record.home.name, " ", element("small", element("span", state, class_="state")))
    metric = record.ranking.metric
    about = [("sweep", str(record.home)), *search_pairs]
    if metric is not None:
        about.insert(1, (f"best {metric.name}", _winner_text(record.ranking)))
    return joined([heading, descriptions(about), facts(pairs)])


def _learning_curves(record: SweepResults) -> Markup:
    metric = record.ranking.metric
    if metric is None or not record.curves:
        return Markup("")
    labels = {"usual": "others", "pale": "paused, failed or stopped"}
    order = {"pale": 0, "usual": 1}  # the best are drawn last
    lines = [
        Line(
            label=labels.get(point.style) or point.row.label,
            xs=curve.steps,
            ys=curve.values,
            style=point.style,
            title=point.title,
        )
        for point, curve in sorted(record.curves, key=lambda pair: order.get(pair[0].style, len(order)))
    ]
    return element("div", line_chart(metric.name, lines), class_="charts")


SHOWN_ROWS = 25
"""Rows that are open."""
MOST_ROWS = 1000
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
    rows = [_cells(row, keys, record, over_seeds=over_seeds) for row in ranking.rows[:MOST_ROWS]]
    parts = [table(head, rows[:SHOWN_ROWS], numbers=numbers)]
    if closed_rows := rows[SHOWN_ROWS:]:
        parts.append(folded(f"{counted(len(closed_rows), 'more row')}", table(head, closed_rows, numbers=numbers)))
    if (left_out := len(ranking.rows) - len(rows)) > 0:
        # without a metric, `best` refuses
        command = f"; all of them: python -m hpctrain best {shlex.quote(str(record.home))} --csv"
        text = f"{counted(left_out, 'row')} after these not shown{command if ranking.metric is not None else ''}"
        parts.append(remark(text))
    return joined(parts)


def _cells(row: RankedRow, keys: Sequence[str], record: SweepResults, *, over_seeds: bool) -> list[str]:
    deviation = None if row.spread is None else row.spread.deviation
    seeds = ["" if deviation is None else f"{deviation:.2g}", str(len(row.runs))]
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
        listed((os.path.relpath(run.status.path, record.home) for run in row.runs), max_names=6, separator=" "),
    ]


def _short(text: str) -> str:
    return text if len(text) <= MOST_CHARS else f"{text[: MOST_CHARS - 1]}\u2026"


def _winner_text(ranking: Ranking) -> str:
    """The best value, and the values that gave it; empty without one."""
    winner = ranking.winner
    if winner is None or winner.best is None:
        return ""
    deviation = None if winner.spread is None else winner.spread.deviation
    spread = "" if deviation is None else f" \u00b1 {deviation:.2g} over {len(winner.runs)} seeds"
    return f"{winner.best:.4g}{spread}, with {winner.label}"

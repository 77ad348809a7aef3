"""The columns of the table of runs: what each shows of a run, by what it sorts, and how wide it is."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.phrases import duration, listed
from hpctrain.run.evaluation import Score
from hpctrain.run.manifest import varied_text
from hpctrain.top.curve import sparkline
from hpctrain.top.watch import WatchedRun

BAR = 6
"""Characters of the progress bar."""
TREND = 10
"""Characters of the curve in the table."""
NOTHING = "-"
_PARTS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True, slots=True)
class TableView:
    """A view of the table of runs.

    Attributes:
        metric: the name of the metric that is shown.
        now: epoch seconds.
        by: the column by which the runs are sorted; None for the order in which they were found.
        descending: whether the largest values of that column come first.
    """

    metric: str
    now: float
    by: Column | None = None
    descending: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table.

    Attributes:
        title: its heading.
        text: what it shows of a run.
        key: by what it sorts; None comes last.
        width: characters; 0 if it takes as many as its texts have, up to what is left.
        rank: in a narrow terminal, columns with the highest rank are left out first.
        right: whether it is aligned to the right.
    """

    title: str
    text: Callable[[WatchedRun, TableView], str]
    key: Callable[[WatchedRun, TableView], float | str | None]
    width: int
    rank: int
    right: bool = False


def progress(run: WatchedRun) -> float | None:
    """The share of the steps that are done; None if it is unknown."""
    status = run.status
    return min(1.0, status.step / status.total_steps) if status.total_steps and status.knows_step else None


def metric_value(run: WatchedRun, view: TableView) -> float | None:
    """The last value of the metric that is shown; None without one."""
    return run.status.metrics.get(view.metric)


def in_order(runs: Sequence[WatchedRun], view: TableView) -> list[WatchedRun]:
    """Sort runs as the view has it, those without a value last; equal ones stay in their order."""
    if view.by is None:
        return list(runs)
    keyed = [(view.by.key(run, view), run) for run in runs]
    sortable = [(key, run) for key, run in keyed if key is not None and key == key]  # noqa: PLR0124 - NaN isn't equal to itself
    sortable.sort(key=lambda pair: pair[0], reverse=view.descending)
    return [run for _, run in sortable] + [run for key, run in keyed if key is None or key != key]  # noqa: PLR0124


def matches(run: WatchedRun, words: Sequence[str]) -> bool:
    """Whether each word is part of the run's name, state, varied keys, job, nodes or reason, in any case."""
    status = run.status
    text = "\n".join(
        (run.name, status.name, status.state, varied_text(status.varied), _job(run), _nodes(run), status.note)
    )
    return all(word in text.casefold() for word in words)


@functools.lru_cache(maxsize=10_000)
def _natural(text: str) -> str:
    """A key by which `sweep/10` comes after `sweep/9`."""
    return re.sub(r"\d+", lambda digits: digits[0].rjust(20, "0"), text)


def _bar(run: WatchedRun) -> str:
    share = progress(run)
    if share is None:
        return f"step {run.status.step}" if run.status.knows_step and run.status.attempts else NOTHING
    eighths = int(share * BAR * 8)
    full, remainder = divmod(eighths, 8)
    bar = ("█" * full + (_PARTS[remainder] if remainder else "")).ljust(BAR, "·")
    return f"{bar} {math.floor(100 * share):3d}%"


def _time_left(run: WatchedRun) -> str:
    seconds = run.status.left_s
    return NOTHING if seconds is None else duration(seconds)


def number_text(value: float | None) -> str:
    """A metric's value as the tables show it."""
    return NOTHING if value is None else f"{value:.4g}"


def _trend(run: WatchedRun, view: TableView) -> str:
    curve = run.curves.by_name.get(view.metric)
    return "" if curve is None else sparkline([value for _, value in curve.points()], TREND)


def best_text(best: Score | None) -> str:
    """The best value of the metric by which a run is judged."""
    return NOTHING if best is None else f"{best.name} {best.value:.4g}"


def _job(run: WatchedRun) -> str:
    return run.status.job_ids[-1] if run.status.job_ids else NOTHING


def _nodes(run: WatchedRun) -> str:
    attempts = run.status.attempts
    # without a job or an attempt that runs, those of the last one
    return listed(attempts[-1].nodes, max_names=2, separator=",") if attempts and attempts[-1].nodes else NOTHING


def _last(run: WatchedRun, view: TableView) -> str:
    last = run.status.last_sign
    return NOTHING if last is None else f"{duration(view.now - last)} ago"


RUN = Column("RUN", lambda run, _: run.name, lambda run, _: _natural(run.name), 0, 0)


def short_varied(varied: Mapping[str, str]) -> str:
    """Keys without their groups, and values: ``lr=0.1 seed=1``."""
    names = [key.rpartition(".")[2] for key in varied]
    # two keys that end alike need their groups
    return varied_text(
        {name if names.count(name) == 1 else key: varied[key] for key, name in zip(varied, names, strict=True)}
    )


VARIED = Column(
    "VARIED",
    lambda run, _: short_varied(run.status.varied) or NOTHING,
    lambda run, _: _natural(short_varied(run.status.varied)),
    0,
    4,
)
STATE = Column("STATE", lambda run, _: str(run.status.state), lambda run, _: str(run.status.state), 11, 1)
PROGRESS = Column("PROGRESS", lambda run, _: _bar(run), lambda run, _: progress(run), BAR + 5, 3)
LEFT = Column("LEFT", lambda run, _: _time_left(run), lambda run, _: run.status.left_s, 6, 5, right=True)
METRIC = Column("METRIC", lambda run, view: number_text(metric_value(run, view)), metric_value, 10, 2, right=True)
TREND_COLUMN = Column("TREND", _trend, metric_value, TREND, 6)
BEST = Column(
    "BEST",
    lambda run, _: best_text(run.status.best),
    lambda run, _: None if run.status.best is None else run.status.best.value,
    16,
    9,
)
JOB = Column("JOB", lambda run, _: _job(run), lambda run, _: _natural(_job(run)), 9, 7)
NODE = Column("NODE", lambda run, _: _nodes(run), lambda run, _: _nodes(run), 14, 8)
LAST = Column(
    "LAST",
    _last,
    lambda run, view: None if run.status.last_sign is None else view.now - run.status.last_sign,
    11,
    10,
    right=True,
)
REASON = Column("REASON", lambda run, _: run.status.note or "", lambda run, _: run.status.note or None, 0, 11)

COLUMNS = (RUN, VARIED, STATE, PROGRESS, LEFT, METRIC, TREND_COLUMN, BEST, JOB, NODE, LAST, REASON)
"""All columns, from left to right."""


WIDE = 120
"""Characters from which columns are further apart."""
_LEAST = {RUN: 16, VARIED: 16, REASON: 20}
_MOST = {RUN: 40, VARIED: 60}


def gap(total: int) -> int:
    """The spaces between columns."""
    return 2 if total >= WIDE else 1


def widths(total: int, needed: Mapping[str, int]) -> dict[str, int]:
    """Choose the columns that fit, and divide the space between them.

    Args:
        total: characters of a line.
        needed: by column's title, the longest text of a column without a width of its own; 0 leaves it out.

    Returns:
        Widths by the column's title, from left to right.
    """
    chosen = [column for column in COLUMNS if column.width or needed.get(column.title, 0)]
    while len(chosen) > 1 and sum(_smallest(column, needed) + gap(total) for column in chosen) - gap(total) > total:
        chosen.remove(max(chosen, key=lambda column: column.rank))
    cells = {column.title: _smallest(column, needed) for column in chosen}
    spare = total - sum(cells.values()) - gap(total) * (len(chosen) - 1)
    for column in chosen:
        if column.width or spare <= 0:
            continue
        largest = min(needed[column.title], _MOST.get(column, total))
        extra = min(spare, max(0, largest - cells[column.title]))
        cells[column.title] += extra
        spare -= extra
    return cells


def _smallest(column: Column, needed: Mapping[str, int]) -> int:
    return column.width or max(len(column.title), min(_LEAST[column], needed[column.title]))

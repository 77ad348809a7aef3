"""A sweep as its page shows it: its runs, and charts of the metric over each key, over all keys, and of the rungs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hpctrain.errors import RunDirectoryError
from hpctrain.files import on_each_file
from hpctrain.phrases import counted
from hpctrain.report.bar_rows import BarPart, waterfall
from hpctrain.report.line_chart import HEIGHT, WIDTH, Frame, Scale, number_text, scale_of
from hpctrain.report.origin import without_secrets
from hpctrain.report.page import Markup, charts_in_rows, element, joined, remark
from hpctrain.results.curves import Curve, read_curves
from hpctrain.results.ranking import MetricValue, RankedRow, Ranking, judging_metric, rank
from hpctrain.results.run_result import SEED, RunResult, read_results
from hpctrain.run.directory import RunDirectory
from hpctrain.run.manifest import value_text
from hpctrain.search.journal import JournalEvent, read_journal
from hpctrain.status.accounting import WallTime

STYLED_RANKS = 3
"""Rows of the ranking that the charts draw in styles of their own."""
CURVE_POINTS = 12_000
"""Points of all learning curves together."""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One run in the charts of a sweep.

    Attributes:
        result: of the run.
        metric_value: its values of the metric.
        row: of the ranking.
        values: by varied key, `seed` included; None for a key that the run lacks.
    """

    result: RunResult
    metric_value: MetricValue
    row: RankedRow
    values: Mapping[str, Any]

    @property
    def style(self) -> str:
        """The class of its lines and dots: the best have their own, those that don't compete are pale."""
        if self.row.rank is not None and self.row.rank <= STYLED_RANKS:
            return f"s{self.row.rank - 1}"
        return "usual" if self.result.counts else "pale"

    @property
    def title(self) -> str:
        """The text that a pointer shows when it rests on the run."""
        best = "" if self.metric_value.best is None else f", best {self.metric_value.best:.4g}"
        return f"{self.result.status.path.name}: {self.row.label}{best}, {self.result.status.state}"


@dataclass(frozen=True)
class SweepResults:
    """A sweep as its page shows it.

    Attributes:
        home: the folder of the runs.
        ranking: of the runs; values that may be secret are hidden.
        why_unranked: why no metric ranks them; empty if one does.
    """

    home: Path
    ranking: Ranking
    why_unranked: str = ""

    @classmethod
    def read(cls, home: Path, directories: Sequence[RunDirectory]) -> SweepResults:
        """Read the runs of a sweep, which may be training at the same time."""
        results = read_results(directories)
        try:
            metric, unranked = judging_metric(results), ""
        except RunDirectoryError as error:
            metric, unranked = None, str(error)
        ranking = rank(results, metric)
        rows = tuple(replace(row, values=without_secrets(row.values)) for row in ranking.rows)
        return cls(home, replace(ranking, rows=rows), unranked)

    @cached_property
    def points(self) -> Sequence[SweepPoint]:
        """The runs, worst first, so that the best are drawn over the others."""
        points = []
        for row in reversed(self.ranking.rows):
            for result, metric_value in zip(row.runs, row.metric_values, strict=True):
                values = {key: row.values.get(key, result.config.get(key)) for key in self.ranking.keys}
                points.append(SweepPoint(result, metric_value, row, values))
        return points

    @cached_property
    def curves(self) -> Sequence[tuple[SweepPoint, Curve]]:
        """The metric of each run that has logged it, thinned, in the order of the points."""
        metric = self.ranking.metric
        if metric is None:
            return []
        max_points = max(16, CURVE_POINTS // max(1, len(self.points)))

        def read(point: SweepPoint) -> Curve | None:
            path, attempts = point.result.directory.metrics, point.result.status.attempts
            curve = read_curves(path, attempts=attempts, containing=f'"{metric.name}"').get(metric.name)
            return None if curve is None else curve.thinned(min(max_points, 200))

        curves = zip(self.points, on_each_file(read, self.points), strict=True)
        return [(point, curve) for point, curve in curves if curve is not None]

    @property
    def spent(self) -> WallTime:
        """The wall time of all runs together."""
        return WallTime.sum_of([point.result.status.account.spent for point in self.points])


LOG_FROM = 10.0
"""The ratio of the largest to the smallest value from which the axis of a key is logarithmic."""
MOST_DRAWN = 1e300
"""Larger numbers, infinities and NaN are texts."""
FEW = 4
"""Up to so many different numbers have a tick each."""
MOST_TICK_CHARS = 14
"""Characters of a value at a tick."""


@dataclass(frozen=True, slots=True)
class KeyAxis:
    """The axis of a key.

    Attributes:
        name: the key.
        scale: of the numbers, or of the places of the texts.
        texts: the place of each text; None if all values are numbers.
        few: the numbers, if they are few.
    """

    name: str
    scale: Scale
    texts: Mapping[str, float] | None = None
    few: Sequence[float] = ()

    @classmethod
    def of(cls, name: str, values: Iterable[object]) -> KeyAxis:
        """The axis that holds all values; None stands for a run without one."""
        present = [value for value in values if value is not None]
        numbers = [number for value in present if (number := _number(value)) is not None]
        if present and len(numbers) == len(present):
            low, high = min(numbers), max(numbers)
            few = sorted(set(numbers)) if len(set(numbers)) <= FEW else []
            return cls(name, scale_of(numbers, log=low > 0 and high / low >= LOG_FROM, margin=0.06), few=few)
        texts = list(dict.fromkeys(value_text(value) for value in present))
        places = {text: float(place) for place, text in enumerate(texts)}
        return cls(name, Scale(-0.6, max(len(texts), 1) - 0.4), places)

    def number(self, value: object) -> float | None:
        """The place of a value in units of the scale; None for a run without one."""
        if value is None:
            return None
        if self.texts is not None:
            return self.texts.get(value_text(value))
        return _number(value)

    def ticks(self, max_ticks: int) -> Sequence[tuple[float, str]]:
        """Places with their texts, at most so many."""
        if self.texts is None:
            # a grid's few values are better ticks than round numbers
            return [(value, number_text(value)) for value in self.few] if self.few else self.scale.ticks(max_ticks)
        ticks = [(place, text if len(text) <= MOST_TICK_CHARS else f"{text[:MOST_TICK_CHARS - 1]}\u2026")
                 for text, place in self.texts.items()]  # fmt: skip
        return ticks[:: math.ceil(len(ticks) / max_ticks) or 1]


def _number(value: object) -> float | None:
    """A number, also one that is a text, as in the arguments of a program; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < MOST_DRAWN else None


SHOWN_KEYS = 8
"""Charts that are open."""
MOST_CHARTS = 24
TITLED = 150
"""Runs up to which each dot has a title of its own: many titles make a large page."""


def key_charts(record: SweepResults) -> Markup:
    """Draw a chart for each varied key; empty without a metric."""
    metric = record.ranking.metric
    points = [point for point in record.points if point.metric_value.best is not None]
    if metric is None or not points:
        return Markup("")
    charts = [_chart(key, metric.name, points) for key in record.ranking.keys[:MOST_CHARTS]]
    has_ranks = any(point.style.startswith("s") for point in points)
    parts = [remark("A number is the rank of the dot beside it.")] if has_ranks else []
    parts += charts_in_rows(charts, SHOWN_KEYS, "key")
    if left_out := record.ranking.keys[MOST_CHARTS:]:
        text = f"{counted(len(left_out), 'key')} not drawn, see the results: {', '.join(left_out)}"
        parts.append(remark(text))
    return joined(parts)


def _chart(key: str, metric: str, points: Sequence[SweepPoint]) -> Markup:
    axis = KeyAxis.of(key, [point.values.get(key) for point in points])
    y = scale_of([point.metric_value.best or 0.0 for point in points], margin=0.04)
    frame = Frame(axis.scale, y, axis.ticks(5))
    # the dots of a style are one path, unless each has a title
    paths: dict[tuple[str, Markup], list[str]] = {}
    ranks: list[Markup] = []
    for point in points:
        place = axis.number(point.values.get(key))
        if place is None:
            continue
        across, down = frame.across(place), f"{frame.down(point.metric_value.best or 0.0):.1f}"
        if point.style.startswith("s"):
            # colour alone is lost in a grey print
            beside = {"x": f"{across + 5:.1f}", "y": down}
            ranks.append(element("text", str(point.row.rank), dy="0.35em", class_="over", **beside))
        dots = (point.style, _title(point, points))
        paths.setdefault(dots, []).append(f"M{across:.1f} {down}h0")
    shapes = [
        element("path", title, d="".join(places), class_=f"dots {style}") for (style, title), places in paths.items()
    ]
    description = f"best {metric} of each run over {key}"
    parts = (frame.axes(key), *shapes, *ranks)
    drawing = element("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=description)
    notes = ", ".join(f"{name} on a log scale" for name, scale in ((key, axis.scale), (metric, y)) if scale.log)
    return element("figure", element("figcaption", key, element("small", f" {notes}")), drawing)


def _title(point: SweepPoint, points: Sequence[SweepPoint]) -> Markup:
    is_titled = len(points) <= TITLED or point.style.startswith("s")
    return element("title", point.title) if is_titled else Markup("")


BETWEEN = 96
"""Units between two axes."""
LINES_HEIGHT, TOP, BOTTOM, SIDE = 240, 40, 14, 34
MOST_KEYS = 12
MOST_CHARS = 15
"""Characters of a key above its axis."""


def parallel_coordinates(record: SweepResults) -> Markup:
    """Draw the runs that have a value of the metric; empty without a metric, or with fewer than two of them."""
    metric = record.ranking.metric
    points = [point for point in record.points if point.metric_value.best is not None]
    # runs that differ in nothing but their seed are one row of the table, and one kind of line here
    over_seeds = any(len(row.runs) > 1 for row in record.ranking.rows)
    all_keys = [key for key in record.ranking.keys if not (over_seeds and key == SEED)]
    keys = all_keys[:MOST_KEYS]
    if metric is None or len(points) < 2 or not keys:
        return Markup("")
    # each with whether its smallest value is at the top
    axes = [(KeyAxis.of(key, [point.values.get(key) for point in points]), False) for key in keys]
    of_metric = KeyAxis(metric.name, scale_of([point.metric_value.best or 0.0 for point in points], margin=0.03))
    axes.append((of_metric, metric.mode == "min"))
    width = BETWEEN * (len(axes) - 1) + 2 * SIDE + 30
    lines = []
    for point in points:
        words: list[str] = []
        values = [*(point.values.get(key) for key in keys), point.metric_value.best]
        for place, ((axis, reverse), value) in enumerate(zip(axes, values, strict=True)):
            number = axis.number(value)
            if number is None:
                # the line has a gap where the run has no value
                words.append("")
                continue
            begins = not words or not words[-1]
            down = _down(axis.scale, number, reverse=reverse)
            words.append(f"{'M' if begins else 'L'}{SIDE + BETWEEN * place} {down:.1f}")
        lines.append(element("path", _title(point, points), d="".join(words), class_=f"line {point.style}"))
    shapes = [_axis(axis, place, reverse=reverse) for place, (axis, reverse) in enumerate(axes)]
    style = f"min-width:{width}px;max-width:{math.floor(1.2 * width)}px"
    description = f"the values of each run, and its best {metric.name}"
    box = f"0 0 {width} {LINES_HEIGHT}"
    drawing = element("svg", *lines, *shapes, viewBox=box, style=style, role="img", aria_label=description)
    note = f" Without {len(all_keys) - len(keys)} more keys." if len(all_keys) > len(keys) else ""
    caption = element("figcaption", "Each line is a run; the best metric is at the top of the last axis.", note)
    return element("figure", caption, drawing, class_="wide")


def _down(scale: Scale, value: float, *, reverse: bool) -> float:
    place = scale.place(value)
    return LINES_HEIGHT - BOTTOM - (1 - place if reverse else place) * (LINES_HEIGHT - TOP - BOTTOM)


def _axis(axis: KeyAxis, place: int, *, reverse: bool) -> Markup:
    across = SIDE + BETWEEN * place
    parts = [element("path", d=f"M{across} {TOP}V{LINES_HEIGHT - BOTTOM}", class_="axis")]
    # neighbours' names have different heights, since most are longer than the space between the axes
    name = axis.name if len(axis.name) <= MOST_CHARS else f"\u2026{axis.name[1 - MOST_CHARS :]}"
    x = max(across, 3.4 * len(name))
    title = element("title", axis.name)
    parts.append(element("text", title, name, x=x, y=14 + 14 * (place % 2), class_="middle strong"))
    for value, text in axis.ticks(6):
        down = f"{_down(axis.scale, value, reverse=reverse):.1f}"
        parts.append(element("path", d=f"M{across - 3} {down}h6", class_="axis"))
        parts.append(element("text", text, x=across + 6, y=down, dy="0.35em", class_="over"))
    return element("g", *parts)


def rung_chart(home: Path) -> Markup:
    """Draw the steps of each rung; empty for a sweep without rungs."""
    ends = [decision for decision in read_journal(RunDirectory.at(home)) if decision.event is JournalEvent.END]
    if not any(end.rung for end in ends):
        return Markup("")
    steps: Counter[int] = Counter()
    reached: Counter[int] = Counter()
    for end in ends:
        # a run may end several times on its way to a rung
        steps[end.rung] += max(0, end.step - reached[end.run])
        reached[end.run] = max(end.step, reached[end.run])
    parts = []
    for rung, spent in sorted(steps.items()):
        runs = {end.run for end in ends if end.rung == rung}
        with_value = {end.run for end in ends if end.rung == rung and end.value is not None}
        share = spent / (steps.total() or 1)
        about = f"{counted(len(runs), 'run')}, {len(with_value)} with a value"
        result = f"{number_text(spent)} steps, {share:.1%}"
        parts.append(BarPart(name=f"rung {rung}", about=about, share=share, result=result))
    text = "Steps that were trained to pass each rung, of all runs together; a run continues from the rung before."
    return joined([remark(text), waterfall(parts)])

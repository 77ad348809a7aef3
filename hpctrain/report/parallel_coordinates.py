"""Parallel coordinates: a vertical axis for each varied key and for the metric, and a line through them per run."""

from __future__ import annotations

import math

from hpctrain.report.key_axis import KeyAxis
from hpctrain.report.markup import Markup, element
from hpctrain.report.scale import Scale, scale_of
from hpctrain.report.sweep_results import SweepResults
from hpctrain.results.varied_keys import SEED

BETWEEN = 96
"""Units between two axes."""
HEIGHT, TOP, BOTTOM, SIDE = 240, 40, 14, 34
MOST_KEYS = 12
MOST_CHARS = 15
"""Characters of a key above its axis."""
TITLED = 150


def parallel_coordinates(record: SweepResults) -> Markup:
    """Draw the runs that have a value of the metric; empty without a metric, or with fewer than two of them."""
    metric = record.ranking.metric
    points = [point for point in record.points if point.number.best is not None]
    # runs that differ in nothing but their seed are one row of the table, and one kind of line here
    over_seeds = any(len(row.runs) > 1 for row in record.ranking.rows)
    every = [key for key in record.ranking.keys if not (over_seeds and key == SEED)]
    keys = every[:MOST_KEYS]
    if metric is None or len(points) < 2 or not keys:
        return Markup("")
    axes = [KeyAxis.of(key, [point.values.get(key) for point in points]) for key in keys]
    axes.append(KeyAxis(metric.name, scale_of([point.number.best or 0.0 for point in points], margin=0.03)))
    width = BETWEEN * (len(axes) - 1) + 2 * SIDE + 30
    lines = []
    for point in points:
        words: list[str] = []
        for place, axis in enumerate(axes):
            value = point.number.best if place == len(axes) - 1 else point.values.get(axis.name)
            number = axis.number(value)
            if number is None:
                # the line has a gap where the run has no value
                words.append("")
                continue
            begins = not words or not words[-1]
            down = _down(axis.scale, number, reverse=place == len(axes) - 1 and metric.mode == "min")
            words.append(f"{'M' if begins else 'L'}{SIDE + BETWEEN * place} {down:.1f}")
        title = element("title", point.title) if len(points) <= TITLED or point.style.startswith("s") else ""
        lines.append(element("path", title, d="".join(words), class_=f"line {point.style}"))
    drawn = [
        _axis(axis, place, reverse=place == len(axes) - 1 and metric.mode == "min") for place, axis in enumerate(axes)
    ]
    style = f"min-width:{width}px;max-width:{math.floor(1.2 * width)}px"
    shown = f"the values of each run, and its best {metric.name}"
    drawing = element("svg", *lines, *drawn, viewBox=f"0 0 {width} {HEIGHT}", style=style, role="img", aria_label=shown)
    left_out = len(every) - len(keys)
    note = f" Without {left_out} more keys." if left_out > 0 else ""
    caption = element("figcaption", "Each line is a run; the best metric is at the top of the last axis.", note)
    return element("figure", caption, drawing, class_="wide")


def _down(scale: Scale, value: float, *, reverse: bool) -> float:
    place = scale.place(value)
    return HEIGHT - BOTTOM - (1 - place if reverse else place) * (HEIGHT - TOP - BOTTOM)


def _axis(axis: KeyAxis, place: int, *, reverse: bool) -> Markup:
    across = SIDE + BETWEEN * place
    parts = [element("path", d=f"M{across} {TOP}V{HEIGHT - BOTTOM}", class_="axis")]
    # neighbours' names have different heights, since most are longer than the space between the axes
    name = axis.name if len(axis.name) <= MOST_CHARS else f"\u2026{axis.name[1 - MOST_CHARS :]}"
    x = max(across, 3.4 * len(name))
    parts.append(
        element("text", element("title", axis.name), name, x=x, y=14 + 14 * (place % 2), class_="middle strong")
    )
    for value, text in axis.ticks(6):
        down = f"{_down(axis.scale, value, reverse=reverse):.1f}"
        parts.append(element("path", d=f"M{across - 3} {down}h6", class_="axis"))
        parts.append(element("text", text, x=across + 6, y=down, dy="0.35em", class_="over"))
    return element("g", *parts)

"""The metric of a sweep over each key that it varies."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.phrases import counted
from hpctrain.report.frame import HEIGHT, WIDTH, Frame
from hpctrain.report.key_axis import KeyAxis
from hpctrain.report.markup import Markup, element, joined
from hpctrain.report.page import folded
from hpctrain.report.scale import scale_of
from hpctrain.report.sweep_results import SweepPoint, SweepResults

SHOWN = 8
"""Charts that are open."""
MOST = 24
TITLED = 150
"""Runs up to which each dot has a title of its own: many titles make a large page."""


def key_charts(record: SweepResults) -> Markup:
    """Draw a chart for each varied key; empty without a metric."""
    metric = record.ranking.metric
    points = [point for point in record.points if point.number.best is not None]
    if metric is None or not points:
        return Markup("")
    charts = [_chart(key, metric.name, points) for key in record.ranking.keys[:MOST]]
    parts = [element("div", *charts[:SHOWN], class_="charts")]
    if any(point.style.startswith("s") for point in points):
        parts.insert(0, element("p", "A number is the rank of the dot beside it.", class_="faint"))
    if more := charts[SHOWN:]:
        parts.append(folded(counted(len(more), "more key"), element("div", *more, class_="charts")))
    if left_out := record.ranking.keys[MOST:]:
        text = f"{counted(len(left_out), 'key')} not drawn, see the results: {', '.join(left_out)}"
        parts.append(element("p", text, class_="faint"))
    return joined(parts)


def _chart(key: str, metric: str, points: Sequence[SweepPoint]) -> Markup:
    axis = KeyAxis.of(key, [point.values.get(key) for point in points])
    y = scale_of([point.number.best or 0.0 for point in points], margin=0.04)
    frame = Frame(axis.scale, y, axis.ticks(5))
    # the dots of a style are one path, unless each has a title
    paths: dict[str, list[str]] = {}
    titled: list[Markup] = []
    ranks: list[Markup] = []
    for point in points:
        place = axis.number(point.values.get(key))
        if place is None:
            continue
        if point.style.startswith("s"):
            # colour alone is lost in a grey print
            beside = {"x": f"{frame.across(place) + 5:.1f}", "y": f"{frame.down(point.number.best or 0.0):.1f}"}
            ranks.append(element("text", str(point.row.rank), dy="0.35em", class_="over", **beside))
        at = f"M{frame.across(place):.1f} {frame.down(point.number.best or 0.0):.1f}h0"
        if len(points) <= TITLED or point.style.startswith("s"):
            titled.append(element("path", element("title", point.title), d=at, class_=f"dots {point.style}"))
        else:
            paths.setdefault(point.style, []).append(at)
    dots = [element("path", d="".join(places), class_=f"dots {style}") for style, places in sorted(paths.items())]
    shown = f"best {metric} of each run over {key}"
    drawing = element(
        "svg", frame.axes(key), *dots, *titled, *ranks, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=shown
    )
    notes = [
        text for text, log in ((f"{key} on a log scale", axis.scale.log), (f"{metric} on a log scale", y.log)) if log
    ]
    return element("figure", element("figcaption", key, element("small", f" {', '.join(notes)}")), drawing)

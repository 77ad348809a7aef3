"""The speed of a run over time: throughput, the slowest rank, what the time was spent on, and the bottleneck."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpctrain.phrases import counted
from hpctrain.report.bar_rows import Part, waterfall
from hpctrain.report.line_chart import Line, LineChart
from hpctrain.report.markup import Markup, element, joined
from hpctrain.report.page import folded, table
from hpctrain.report.run_record import RunRecord
from hpctrain.report.slowest_rank_chart import slowest_rank_chart
from hpctrain.report.time_axis import TimeAxis
from hpctrain.results.curves import Curve
from hpctrain.run.bottleneck import Bottleneck, read_bottleneck

POINTS = 220
SHOWN = ("throughput/samples_per_s", "throughput/waiting_for_data", "throughput/mfu", "memory/peak_gb")
"""The curves that are drawn over time; the throughput per device has the shape of the first one."""
KINDS = {"evaluation": "evaluating", "saving": "saving", "gradient_sync": "lost", "data": "lost"}
"""The class of the bar of a part of the time, where it isn't `working`."""
ROWS = 50
"""Attempts in the table of slowest ranks."""


def speed_charts(record: RunRecord) -> Markup:
    """Draw the speed; empty if nothing of it was measured."""
    found = [
        (span, bottleneck)
        for span in record.spans
        if (bottleneck := read_bottleneck(record.directory.attempt(span.attempt.attempt))) is not None
    ]
    curves = [curve for name in SHOWN if (curve := record.curves.get(name)) is not None]
    parts: list[object] = []
    if found:
        parts.append(_bottleneck(found[-1][1], found[-1][0].attempt.attempt))
    charts = _charts(curves, record)
    if slowest := slowest_rank_chart(record, [(span, one) for span, one in found if one.slowest_ratio is not None]):
        charts.append(slowest)
    if charts:
        explained = "Over time, since the run began. Shaded: an attempt was at work."
        parts += [element("p", explained, class_="faint"), element("div", *charts, class_="charts")]
    named = [(span, one) for span, one in found if one.slowest_rank is not None]
    if named:
        rows = [
            (
                str(span.attempt.attempt),
                str(one.slowest_rank),
                one.slowest_host or "?",
                f"{one.slowest_ratio or math.nan:.2f}",
                str(one.step),
            )
            for span, one in named[-ROWS:]
        ]
        head = ("attempt", "slowest rank", "host", "times the others", "up to step")
        shown: list[object] = [table(head, rows, numbers=(0, 1, 3, 4))]
        if (left_out := len(named) - len(rows)) > 0:
            text = f"{counted(left_out, 'earlier attempt')} not shown, see attempts/*/verdict.json in the run directory"
            shown.append(element("p", text, class_="faint"))
        parts.append(folded("The slowest rank of each attempt", *shown))
    return joined(parts)


def _bottleneck(found: Bottleneck, attempt: int) -> Markup:
    parts: list[object] = [element("p", element("b", "Bottleneck: "), found.text)]
    if found.also:
        parts.append(element("ul", *(element("li", text) for text in found.also)))
    figures = [
        f"{found.samples_per_s_per_device:.4g} samples/s per device" if found.samples_per_s_per_device else "",
        f"MFU {found.mfu:.1%}" if found.mfu is not None else "",
        f"memory peak {found.memory_peak_bytes / 1e9:.2f} GB" if found.memory_peak_bytes else "",
    ]
    if text := ", ".join(filter(None, figures)):
        parts.append(element("p", text))
    if found.shares:
        shares = [
            Part(name=part.replace("_", " "), share=share, result=f"{share:.1%}", kind=KINDS.get(part, "working"))
            for part, share in found.shares.items()
        ]
        heading = f"Time after the first step of attempt {attempt}, up to step {found.step}, as the mean over the ranks"
        parts += [element("h3", heading), waterfall(shares)]
    return joined(parts)


def _charts(curves: Sequence[Curve], record: RunRecord) -> list[Markup]:
    charts = []
    for curve in curves:
        known = [place for place, when in enumerate(curve.times) if math.isfinite(when)]
        if not known:
            continue
        axis = TimeAxis.of(record, curve.times[known[-1]])
        thin = curve.thinned(POINTS)
        points = sorted(
            (axis.place(when), value)
            for when, value in zip(thin.times, thin.values, strict=True)
            if math.isfinite(when)
        )
        # no line from one attempt to the next, which may come days later
        xs, ys = _broken(points, [band.start for band in axis.bands[1:]])
        line = Line(label=curve.name, xs=xs, ys=ys)
        chart = LineChart(caption=curve.name, lines=[line], x_label=axis.label, bands=axis.bands, from_zero=True)
        charts.append(chart.drawn())
    return charts


def _broken(points: Sequence[tuple[float, float]], breaks: Sequence[float]) -> tuple[list[float], list[float]]:
    xs: list[float] = []
    ys: list[float] = []
    pending = list(breaks)
    for x, y in points:
        if pending and x >= pending[0]:
            while pending and x >= pending[0]:
                pending.pop(0)
            xs.append(math.nan)
            ys.append(0.0)
        xs.append(x)
        ys.append(y)
    return xs, ys

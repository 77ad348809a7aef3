"""The speed of a run over time: throughput, the slowest rank, what the time was spent on, and the bottleneck."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpctrain.phrases import counted, local_time
from hpctrain.report.bar_rows import BarRow, Stretch, bar_rows
from hpctrain.report.frame import Band
from hpctrain.report.line_chart import Line, LineChart
from hpctrain.report.markup import Markup, element, joined
from hpctrain.report.page import folded, table
from hpctrain.report.run_record import RunRecord
from hpctrain.results.curves import Curve
from hpctrain.run.bottleneck import Bottleneck, read_bottleneck

POINTS = 220
SHOWN = ("throughput/samples_per_s", "throughput/waiting_for_data", "throughput/mfu", "memory/peak_gb")
"""The curves that are drawn over time; the throughput per device has the shape of the first one."""
ROWS = 50
"""Attempts in the table of slowest ranks."""
_UNITS = (
    (2 * 86400.0, 86400.0, "days"),
    (2 * 3600.0, 3600.0, "hours"),
    (120.0, 60.0, "minutes"),
    (0.0, 1.0, "seconds"),
)


def speed_charts(record: RunRecord) -> Markup:
    """Draw the speed; empty if nothing of it was measured."""
    found = [
        (span, bottleneck)
        for span in record.spans
        if (bottleneck := read_bottleneck(record.directory.claim(span.attempt.attempt))) is not None
    ]
    curves = [curve for name in SHOWN if (curve := record.curves.get(name)) is not None]
    parts: list[object] = []
    if found:
        parts.append(_bottleneck(found[-1][1], found[-1][0].attempt.attempt))
    charts = _charts(curves, record)
    if slowest := _slowest([(span.begin, span.end, one) for span, one in found], record):
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
        rows, at = [], 0.0
        for part, share in found.shares.items():
            kind = {"evaluation": "evaluating", "saving": "saving", "gradient_sync": "lost", "data": "lost"}
            stretch = Stretch(kind.get(part, "working"), at, share, f"{share:.1%}")
            rows.append(BarRow(name=part.replace("_", " "), stretches=[stretch], result=f"{share:.1%}"))
            at += share
        heading = f"Time after the first step of attempt {attempt}, up to step {found.step}, as the mean over the ranks"
        parts += [element("h3", heading), bar_rows(rows)]
    return joined(parts)


def _charts(curves: Sequence[Curve], record: RunRecord) -> list[Markup]:
    charts = []
    for curve in curves:
        known = [place for place, when in enumerate(curve.times) if math.isfinite(when)]
        if not known:
            continue
        size, unit, bands = _time_axis(record, curve.times[known[-1]])
        thin = curve.thinned(POINTS)
        points = sorted(
            (max(0.0, when - record.origin) / size, value)
            for when, value in zip(thin.times, thin.values, strict=True)
            if math.isfinite(when)
        )
        # no line from one attempt to the next, which may come days later
        xs, ys = _broken(points, [band.start for band in bands[1:]])
        line = Line(label=curve.name, xs=xs, ys=ys)
        x_label = f"{unit} since {local_time(record.origin)}"
        charts.append(LineChart(caption=curve.name, lines=[line], x_label=x_label, bands=bands, from_zero=True).drawn())
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


def _slowest(found: Sequence[tuple[float, float, Bottleneck]], record: RunRecord) -> Markup | None:
    """A stretch for each attempt at the height of its slowest rank's time, over that of the others."""
    known = [(begin, end, one) for begin, end, one in found if one.slowest_ratio is not None]
    if not known:
        return None
    size, unit, bands = _time_axis(record, known[-1][1])
    lines = []
    for begin, end, one in known:
        title = f"rank {one.slowest_rank} on {one.slowest_host}: {one.slowest_ratio:.2f} times the others"
        xs = [(begin - record.origin) / size, (end - record.origin) / size]
        lines.append(Line(label="", xs=xs, ys=[one.slowest_ratio or 0.0] * 2, title=title))
    caption = "slowest rank's own time of a step, over the median of the others"
    return LineChart(
        caption=caption, lines=lines, x_label=f"{unit} since {local_time(record.origin)}", bands=bands
    ).drawn()


def _time_axis(record: RunRecord, last: float) -> tuple[float, str, list[Band]]:
    """The size and the name of a unit of time, and the attempts in it."""
    ends = [span.end for span in record.spans]
    whole = max([last, *ends]) - record.origin
    size, unit = next((size, unit) for least, size, unit in _UNITS if whole >= least)
    bands = [
        Band(
            (span.begin + span.account.spent.queued_s - record.origin) / size,
            (span.end - record.origin) / size,
            f"attempt {span.attempt.attempt}",
        )
        for span in record.spans
    ]
    return size, unit, bands

"""A chart of the slowest rank over time: which one it was, and how much longer than the others it took."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from hpctrain.report.line_chart import Line, LineChart
from hpctrain.report.markup import Markup
from hpctrain.report.run_record import AttemptSpan, RunRecord
from hpctrain.report.time_axis import TimeAxis
from hpctrain.run.bottleneck import Bottleneck

RANK, RATIO = "throughput/slowest_rank", "throughput/slowest_ratio"
CAPTION = "slowest rank's own time of a step, over the median of the others"
POINTS = 220
NAMED = 3
"""Ranks that have a colour of their own: those that are slowest most often."""


class _Point(NamedTuple):
    when: float
    rank: int
    ratio: float


def slowest_rank_chart(record: RunRecord, found: Sequence[tuple[AttemptSpan, Bottleneck]]) -> Markup | None:
    """Draw the slowest rank.

    Args:
        record: of the run.
        found: the attempts that measured their slowest rank; drawn where metrics.jsonl doesn't have it over time.

    Returns:
        The chart; None if nothing is known of it.
    """
    if points := _points(record):
        return _over_time(record, points)
    if not found:
        return None
    axis = TimeAxis.of(record, found[-1][0].end)
    lines = [
        Line(
            label="",
            xs=[axis.place(span.begin), axis.place(span.end)],
            ys=[one.slowest_ratio or 0.0] * 2,
            title=f"rank {one.slowest_rank} on {one.slowest_host}: {one.slowest_ratio:.2f} times the others",
        )
        for span, one in found
    ]
    return LineChart(caption=CAPTION, lines=lines, x_label=axis.label, bands=axis.bands).drawn()


def _points(record: RunRecord) -> list[_Point]:
    """The records, in the order of time; of very many, the one with the highest ratio of each stretch."""
    ranks, ratios = record.curves.get(RANK), record.curves.get(RATIO)
    if ranks is None or ratios is None:
        return []
    rank_at = {step: rank for step, rank in zip(ranks.steps, ranks.values, strict=True) if math.isfinite(rank)}
    records = zip(ratios.steps, ratios.times, ratios.values, strict=True)
    points = sorted(
        _Point(when, int(rank_at[step]), ratio)
        for step, when, ratio in records
        if step in rank_at and math.isfinite(when) and math.isfinite(ratio)
    )
    size = max(1, math.ceil(len(points) / POINTS))
    return [max(points[first : first + size], key=lambda one: one.ratio) for first in range(0, len(points), size)]


def _over_time(record: RunRecord, points: Sequence[_Point]) -> Markup:
    axis = TimeAxis.of(record, points[-1].when)
    often = [rank for rank, _ in Counter(point.rank for point in points).most_common(NAMED)]
    starts = [band.start for band in axis.bands[1:]]
    lines = []
    # no line from one rank to another, nor from one attempt to the next
    together = itertools.groupby(points, lambda one: (one.rank, bisect.bisect(starts, axis.place(one.when))))
    for (rank, _), group in together:
        stretch = list(group)
        lines.append(
            Line(
                label=f"rank {rank}" if rank in often else "another rank",
                xs=[axis.place(point.when) for point in stretch],
                ys=[point.ratio for point in stretch],
                style=f"s{often.index(rank)}" if rank in often else "usual",
                title=f"rank {rank}: up to {max(point.ratio for point in stretch):.2f} times the others",
                every_point=True,
            )
        )
    only = f": rank {often[0]}" if len(often) == 1 else ""
    return LineChart(caption=f"{CAPTION}{only}", lines=lines, x_label=axis.label, bands=axis.bands).drawn()

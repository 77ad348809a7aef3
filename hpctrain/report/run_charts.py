"""A run as its page shows it: when its attempts were at work, and charts of its speed."""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hpctrain.config.plain_yaml import read_plain_config
from hpctrain.phrases import counted, duration, local_time
from hpctrain.report.bar_rows import BarPart, waterfall
from hpctrain.report.line_chart import Band, Line, Mark, line_chart
from hpctrain.report.page import Markup, element, folded, joined, remark, table
from hpctrain.results.curves import Curve, read_curves
from hpctrain.run.bottleneck import Bottleneck, read_bottleneck
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Attempt
from hpctrain.status.accounting import AttemptAccount, end_of
from hpctrain.status.run_status import RunStatus, read_statuses
from hpctrain.status.state import RunState


@dataclass(frozen=True, slots=True)
class AttemptSpan:
    """When an attempt was queued and at work.

    Attributes:
        attempt: its records.
        account: where its time went.
        begin: epoch seconds, of its time in the queue.
        end: epoch seconds; of a running attempt, now.
    """

    attempt: Attempt
    account: AttemptAccount
    begin: float
    end: float

    @property
    def work_begin(self) -> float:
        """Epoch seconds of the end of its time in the queue."""
        return self.begin + self.account.spent.queued_s


_UNITS = (
    (2 * 86400.0, 86400.0, "days"),
    (2 * 3600.0, 3600.0, "hours"),
    (120.0, 60.0, "minutes"),
    (0.0, 1.0, "seconds"),
)


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Time since the beginning of a run.

    Attributes:
        origin: epoch seconds of the beginning.
        size: of a unit, in seconds.
        label: below the axis.
        bands: when each attempt was at work.
    """

    origin: float
    size: float
    label: str
    bands: list[Band]

    def place(self, when: float) -> float:
        """The place of a time on the axis; ``when`` is in epoch seconds."""
        return max(0.0, when - self.origin) / self.size

    def attempt_at(self, place: float) -> int:
        """The position of the attempt to which a place on the axis belongs: no line leads from one to the next."""
        return bisect.bisect([band.start for band in self.bands[1:]], place)


@dataclass(frozen=True)
class RunRecord:
    """A run as its page shows it.

    Attributes:
        directory: of the run.
        status: of the run.
        curves: by name.
    """

    directory: RunDirectory
    status: RunStatus
    curves: Mapping[str, Curve]

    @classmethod
    def read(cls, directory: RunDirectory) -> RunRecord:
        """Read a run, which may be training at the same time."""
        (status,) = read_statuses([directory])
        # a program drops records by itself, and what it resumed from is known only if it reported that
        is_program = "run" in read_plain_config(directory.config)
        attempts = () if is_program else status.attempts
        return cls(directory, status, read_curves(directory.metrics, attempts=attempts))

    @cached_property
    def spans(self) -> Sequence[AttemptSpan]:
        """Of the attempts whose times are known, oldest first."""
        accounts = {account.attempt: account for account in self.status.account.attempts}
        spans = []
        for attempt in self.status.attempts:
            account = accounts[attempt.attempt]
            is_running = attempt.open and attempt is self.status.attempts[-1] and self.status.state is RunState.RUNNING
            end = time.time() if is_running else end_of(attempt)
            if end is not None:
                spans.append(AttemptSpan(attempt, account, end - account.spent.total_s, end))
        return spans

    @cached_property
    def axis(self) -> TimeAxis:
        """The time since the first attempt, or the first record, on which all attempts and records fit."""
        times = [when for curve in self.curves.values() for when in (*curve.times[:1], *curve.times[-1:])]
        moments = [when for span in self.spans for when in (span.begin, span.end)]
        moments = [*moments, *filter(math.isfinite, times)] or [time.time()]
        origin, length_s = min(moments), max(moments) - min(moments)
        size, unit = next((size, unit) for least, size, unit in _UNITS if length_s >= least)
        bands = [
            Band((span.work_begin - origin) / size, (span.end - origin) / size, f"attempt {span.attempt.attempt}")
            for span in self.spans
        ]
        return TimeAxis(origin, size, f"{unit} since {local_time(origin)}", bands)

    @cached_property
    def marks(self) -> Sequence[Mark]:
        """Marks at the steps at which attempts resumed, and at the last one's end, if it didn't complete."""
        attempts = self.status.attempts
        marks = [
            Mark(attempt.actual_start_step, f"\u25b8{attempt.attempt}", self._resumed(before, attempt))
            for before, attempt in itertools.pairwise(attempts)
            if attempt.actual_start_step is not None
        ]
        last = attempts[-1] if attempts else None
        if last is not None and last.reason is not None and last.end_step and last.reason.meaning.exit_code:
            title = f"attempt {last.attempt} ended at step {last.end_step}: {last.reason}"
            marks.append(Mark(last.end_step, "\u25a0", title))
        return marks

    @cached_property
    def repeated(self) -> Sequence[Band]:
        """Stretches of steps that were repeated after a resume."""
        attempts = self.status.attempts
        bands = []
        for before, attempt in itertools.pairwise(attempts):
            first, last = attempt.actual_start_step, before.reached_step
            if first is not None and last is not None and first < last:
                title = f"attempt {attempt.attempt} repeated {counted(last - first, 'step')}, from step {first} on"
                bands.append(Band(first, last, title))
        return bands

    @staticmethod
    def _resumed(before: Attempt, attempt: Attempt) -> str:
        why = before.reason or "no recorded end"
        pause = ""
        if before.end_time is not None and attempt.start_time is not None:
            pause = f", {duration(attempt.start_time - before.end_time)} later"
        resume = f"attempt {attempt.attempt} resumed from step {attempt.actual_start_step}"
        return f"attempt {before.attempt} ended: {why}; {resume}{pause}"


POINTS = 220
"""Points of a curve: more can't be told apart in a chart of this size."""
SHOWN = ("throughput/samples_per_s", "throughput/waiting_for_data", "throughput/mfu", "memory/peak_gb")
"""The curves that are drawn over time; the throughput per device has the shape of the first one."""
KINDS = {"evaluation": "evaluating", "saving": "saving", "gradient_sync": "lost", "data": "lost"}
"""The class of the bar of a part of the time, where it isn't `working`."""
ROWS = 50
"""Attempts in the table of slowest ranks."""


def speed_charts(record: RunRecord) -> Markup:
    """Draw the speed; empty if nothing of it was measured."""
    numbers = [span.attempt.attempt for span in record.spans]
    records = {number: read_bottleneck(record.directory.attempt(number)) for number in numbers}
    bottlenecks = {number: cause for number, cause in records.items() if cause is not None}
    curves = [curve for name in SHOWN if (curve := record.curves.get(name)) is not None]
    parts: list[object] = [_bottleneck(cause, number) for number, cause in list(bottlenecks.items())[-1:]]
    charts = _charts(curves, record.axis)
    if points := _slowest_points(record):
        charts.append(_slowest_rank_chart(points, record.axis))
    if charts:
        explanation = "Over time, since the run began. Shaded: an attempt was at work."
        parts += [remark(explanation), element("div", *charts, class_="charts")]
    rows = [
        (str(number), str(cause.slowest_rank), cause.slowest_host or "?", f"{cause.slowest_ratio:.2f}", str(cause.step))
        for number, cause in bottlenecks.items()
        if cause.slowest_rank is not None and cause.slowest_ratio is not None
    ]
    if rows:
        head = ("attempt", "slowest rank", "host", "times the others", "up to step")
        contents = [table(head, rows[-ROWS:], numbers=(0, 1, 3, 4))]
        if earlier := rows[:-ROWS]:
            where = "see attempts/*/verdict.json in the run directory"
            contents.append(remark(f"{counted(len(earlier), 'earlier attempt')} not shown, {where}"))
        parts.append(folded("The slowest rank of each attempt", *contents))
    return joined(parts)


def _bottleneck(cause: Bottleneck, number: int) -> Markup:
    parts: list[object] = [element("p", element("b", "Bottleneck: "), cause.text)]
    if cause.also:
        parts.append(element("ul", *(element("li", text) for text in cause.also)))
    if cause.figures:
        parts.append(element("p", ", ".join(cause.figures)))
    if cause.shares:
        shares = [
            BarPart(name=part.replace("_", " "), share=share, result=f"{share:.1%}", kind=KINDS.get(part, "working"))
            for part, share in cause.shares.items()
        ]
        heading = f"Time after the first step of attempt {number}, up to step {cause.step}, as the mean over the ranks"
        parts += [element("h3", heading), waterfall(shares)]
    return joined(parts)


def _charts(curves: Sequence[Curve], axis: TimeAxis) -> list[Markup]:
    charts = []
    for curve in curves:
        thin = curve.thinned(POINTS)
        times = zip(thin.times, thin.values, strict=True)
        points = sorted((axis.place(when), value) for when, value in times if math.isfinite(when))
        if not points:
            continue
        # an attempt may begin days after the one before
        groups = itertools.groupby(points, lambda point: axis.attempt_at(point[0]))
        broken = [point for _, group in groups for point in ((math.nan, 0.0), *group)][1:]
        line = Line(label=curve.name, xs=[x for x, _ in broken], ys=[y for _, y in broken])
        charts.append(line_chart(curve.name, [line], x_label=axis.label, bands=axis.bands, from_zero=True))
    return charts


RANK, RATIO = "throughput/slowest_rank", "throughput/slowest_ratio"
CAPTION = "slowest rank's own time of a step, over the median of the others"
NAMED = 3
"""Ranks that have a colour of their own: those that are slowest most often."""


class _Point(NamedTuple):
    when: float
    rank: int
    ratio: float


def _slowest_points(record: RunRecord) -> list[_Point]:
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
    return [max(points[first : first + size], key=lambda point: point.ratio) for first in range(0, len(points), size)]


def _slowest_rank_chart(points: Sequence[_Point], axis: TimeAxis) -> Markup:
    frequent = [rank for rank, _ in Counter(point.rank for point in points).most_common(NAMED)]
    lines = []
    # no line leads from one rank to another either
    together = itertools.groupby(points, lambda point: (point.rank, axis.attempt_at(axis.place(point.when))))
    for (rank, _), group in together:
        stretch = list(group)
        lines.append(
            Line(
                label=f"rank {rank}" if rank in frequent else "another rank",
                xs=[axis.place(point.when) for point in stretch],
                ys=[point.ratio for point in stretch],
                style=f"s{frequent.index(rank)}" if rank in frequent else "usual",
                title=f"rank {rank}: up to {max(point.ratio for point in stretch):.2f} times the others",
                every_point=True,
            )
        )
    suffix = f": rank {frequent[0]}" if len(frequent) == 1 else ""
    return line_chart(f"{CAPTION}{suffix}", lines, x_label=axis.label, bands=axis.bands)

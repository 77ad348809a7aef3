"""The curves of a run: its metrics over steps and time, read fast, and thinned for drawing."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.files import LARGEST_LOG_BYTES, read_lines
from hpctrain.run.ledger import Attempt
from hpctrain.run.record_fields import COUNT, NUMBER, TIME

CHUNK = 4096
"""Lines that are parsed at once: one call per line costs as much again as the parsing."""
_SPELLED = ("nan", "inf", "-inf")


@dataclass(frozen=True, slots=True)
class Curve:
    """The values of one metric, in the order of their steps; the lists have equal lengths.

    Attributes:
        name: as logged, such as `train/loss`.
        steps: rising.
        times: epoch seconds; NaN for a record without a time.
        values: NaN and infinities included.
    """

    name: str
    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, step: int, time: float, value: float) -> None:
        """Add a value; it replaces those of the same and of later steps, which a resume has repeated."""
        steps = self.steps
        while steps and steps[-1] >= step:
            steps.pop()
            self.times.pop()
            self.values.pop()
        steps.append(step)
        self.times.append(time)
        self.values.append(value)

    def thinned(self, points: int) -> Curve:
        """The curve with at most about so many points: of each stretch the lowest, the highest and one not finite."""
        count = len(self.steps)
        if count <= points:
            return self
        stretches = max(1, points // 2)
        edges = [count * place // stretches for place in range(stretches + 1)]
        kept = sorted({0, count - 1}.union(*(self._extremes(first, end) for first, end in itertools.pairwise(edges))))
        return Curve(
            self.name,
            [self.steps[place] for place in kept],
            [self.times[place] for place in kept],
            [self.values[place] for place in kept],
        )

    def _extremes(self, first: int, end: int) -> set[int]:
        values = self.values[first:end]
        if not all(map(math.isfinite, values)):
            finite = [place for place in range(first, end) if math.isfinite(self.values[place])]
            odd = next(place for place in range(first, end) if not math.isfinite(self.values[place]))
            key = self.values.__getitem__
            return {odd, min(finite, key=key), max(finite, key=key)} if finite else {odd}
        # min, max and index run in C
        return {first + values.index(min(values)), first + values.index(max(values))}


def read_curves(path: Path, *, attempts: Sequence[Attempt] = (), containing: str | None = None) -> dict[str, Curve]:
    """Read the curves of metrics.jsonl by name, in the order in which the names appear; empty without the file.

    Torn lines are skipped, and records that a resume made void: a later attempt began before their step.

    Args:
        path: the file.
        attempts: of the run, oldest first.
        containing: parse only lines that contain this text, such as a metric's name in quotes.
    """
    wanted = (containing or "").encode(errors="replace")
    lines = (line for line in read_lines(path, at_most=LARGEST_LOG_BYTES) if wanted in line and line.strip())
    void = _Void(attempts)
    curves: dict[str, Curve] = {}
    for record in _records(lines):
        step, time = record.pop("step", None), record.pop("time", None)
        if not COUNT.accepts(step):
            continue
        time = time if TIME.accepts(time) else math.nan
        if void.covers(step, time):
            continue
        for name, value in _numbers(record):
            curve = curves.get(name)
            if curve is None:
                curve = curves[name] = Curve(name)
            curve.add(step, time, value)
    return curves


class _Void:
    """Which records are void: those that were logged before an attempt that began with an earlier step."""

    def __init__(self, attempts: Sequence[Attempt]) -> None:
        resumes = sorted(
            (attempt.start_time, attempt.actual_start_step)
            for attempt in attempts
            if attempt.start_time is not None and attempt.actual_start_step is not None
        )
        self._times = [time for time, _ in resumes]
        # of all attempts from this one on, the earliest step
        lowest = itertools.accumulate((step for _, step in reversed(resumes)), min)
        self._steps = list(lowest)[::-1]

    def covers(self, step: int, time: float) -> bool:
        place = bisect.bisect_right(self._times, time)
        return place < len(self._times) and step > self._steps[place] and not math.isnan(time)


def _records(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    while chunk := _next_chunk(lines):
        try:
            found = json.loads(b"[" + b",".join(chunk) + b"]")
        except (ValueError, RecursionError):
            found = []
        # two torn lines may be one record when they are joined
        for record in found if len(found) == len(chunk) else _one_by_one(chunk):
            if isinstance(record, dict):
                yield record


def _next_chunk(lines: Iterator[bytes]) -> list[bytes]:
    # what can't be read ends the records
    with contextlib.suppress(OSError):
        return list(itertools.islice(lines, CHUNK))
    return []


def _one_by_one(lines: Iterable[bytes]) -> Iterator[Any]:
    for line in lines:
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            continue


def _numbers(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    nonfinite = record.pop("nonfinite", None)
    for name, value in record.items():
        if type(value) is float or NUMBER.accepts(value):
            yield name, float(value)
    if isinstance(nonfinite, dict):
        yield from ((name, float(text)) for name, text in nonfinite.items() if text in _SPELLED)

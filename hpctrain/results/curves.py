"""The curves of a run: its metrics over steps and time, thinned for drawing."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.files import LARGEST_LOG_BYTES, json_lines, read_lines
from hpctrain.run.ledger import Attempt
from hpctrain.status.metrics import metrics_of


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
        """The curve with at most about so many points: of each stretch the lowest, the highest and one not finite.

        Unlike means or every n-th value, this keeps spikes.
        """
        count = len(self.steps)
        if count <= points:
            return self
        stretches = max(1, points // 2)
        edges = [count * place // stretches for place in range(stretches + 1)]
        places = sorted({0, count - 1}.union(*(self._extremes(first, end) for first, end in itertools.pairwise(edges))))
        return Curve(
            self.name,
            [self.steps[place] for place in places],
            [self.times[place] for place in places],
            [self.values[place] for place in places],
        )

    def _extremes(self, first: int, end: int) -> set[int]:
        values = self.values[first:end]
        if all(map(math.isfinite, values)):
            # min, max and index run in C
            return {first + values.index(min(values)), first + values.index(max(values))}
        finite = [place for place in range(first, end) if math.isfinite(self.values[place])]
        odd = next(place for place in range(first, end) if not math.isfinite(self.values[place]))
        value_at = self.values.__getitem__
        return {odd, min(finite, key=value_at), max(finite, key=value_at)} if finite else {odd}


def read_curves(path: Path, *, attempts: Sequence[Attempt] = (), containing: str | None = None) -> dict[str, Curve]:
    """Read the curves of metrics.jsonl by name, in the order in which the names appear; empty without the file.

    Torn lines are skipped, and records that a resume made void: a later attempt began before their step.

    Args:
        path: the file.
        attempts: of the run, oldest first.
        containing: parse only lines that contain this text, such as a metric's name in quotes.
    """
    pattern = (containing or "").encode(errors="replace")
    resumes = sorted(
        (attempt.start_time, attempt.actual_start_step)
        for attempt in attempts
        if attempt.start_time is not None and attempt.actual_start_step is not None
    )
    begins = [time for time, _ in resumes]
    # of all attempts from this one on, the earliest step
    earliest = list(itertools.accumulate((step for _, step in reversed(resumes)), min))[::-1]
    curves: dict[str, Curve] = {}
    with contextlib.suppress(OSError):  # what can't be read ends the records
        lines = (line for line in read_lines(path, at_most=LARGEST_LOG_BYTES) if pattern in line)
        for record in metrics_of(json_lines(lines)):
            time = math.nan if record.time is None else record.time
            # a record without a time is before no attempt
            place = bisect.bisect_right(begins, time)
            if place < len(begins) and record.step > earliest[place]:
                continue
            for name, value in record.values.items():
                curve = curves.get(name)
                if curve is None:
                    curve = curves[name] = Curve(name)
                curve.add(record.step, time, value)
    return curves

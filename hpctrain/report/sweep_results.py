"""What a sweep's page is made of: its runs with their results, ranked, and the curves of their metric."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hpctrain.config.secret_keys import may_be_secret
from hpctrain.errors import RunDirectoryError
from hpctrain.files import on_each_file
from hpctrain.results.curves import Curve, read_curves
from hpctrain.results.ranking import RankedRow, Ranking, rank
from hpctrain.results.ranking_metric import MetricValue, judging_metric
from hpctrain.results.run_result import RunResult, read_results
from hpctrain.run.directory import RunDirectory
from hpctrain.status.accounting import WallTime

TOP = 3
"""Rows of the ranking that the charts draw in styles of their own."""
POINTS = 12_000
"""Points of all learning curves together."""


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by key, those that may be secret replaced by stars: a page is sent to others."""
    return {key: "***" if may_be_secret(key) else value for key, value in values.items()}


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One run in the charts of a sweep.

    Attributes:
        result: of the run.
        number: its values of the metric.
        row: of the ranking.
        values: by varied key, `seed` included; a key that the run lacks is left out.
    """

    result: RunResult
    number: MetricValue
    row: RankedRow
    values: Mapping[str, Any]

    @property
    def style(self) -> str:
        """The class of its lines and dots: the best have their own, those that don't compete are pale."""
        if self.row.rank is not None and self.row.rank <= TOP:
            return f"s{self.row.rank - 1}"
        return "usual" if self.result.counts else "pale"

    @property
    def title(self) -> str:
        """What a pointer shows that rests on the run."""
        best = "" if self.number.best is None else f", best {self.number.best:.4g}"
        return f"{self.result.status.path.name}: {self.row.label}{best}, {self.result.status.state}"


@dataclass(frozen=True)
class SweepResults:
    """A sweep as its page shows it.

    Attributes:
        home: the folder of the runs.
        ranking: of the runs; values that may be secret are hidden.
        unranked: why no metric ranks them; empty if one does.
    """

    home: Path
    ranking: Ranking
    unranked: str = ""

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
        return [point for row in reversed(self.ranking.rows) for point in self._points(row)]

    def _points(self, row: RankedRow) -> Iterator[SweepPoint]:
        for result, number in zip(row.runs, row.numbers, strict=True):
            values = {key: row.values.get(key, result.config.get(key)) for key in self.ranking.keys}
            known = {key: value for key, value in values.items() if value is not None}
            yield SweepPoint(result, number, row, known)

    @cached_property
    def curves(self) -> Sequence[tuple[SweepPoint, Curve]]:
        """The metric of each run that has logged it, thinned, in the order of the points."""
        metric = self.ranking.metric
        if metric is None:
            return []
        most = max(16, POINTS // max(1, len(self.points)))

        def read(point: SweepPoint) -> Curve | None:
            path, attempts = point.result.directory.metrics, point.result.status.attempts
            curve = read_curves(path, attempts=attempts, containing=f'"{metric.name}"').get(metric.name)
            return None if curve is None else curve.thinned(min(most, 200))

        found = zip(self.points, on_each_file(read, self.points), strict=True)
        return [(point, curve) for point, curve in found if curve is not None]

    @property
    def spent(self) -> WallTime:
        """The wall time of all runs together."""
        spent = [point.result.status.account.spent for point in self.points]
        return WallTime(
            **{field.name: math.fsum(getattr(one, field.name) for one in spent) for field in fields(WallTime)}
        )

"""The runs of a sweep, best first, with the spread over runs that differ in nothing but `seed`."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpctrain.results.ranking_metric import MetricValue, RankingMetric, metric_value
from hpctrain.results.run_result import SEED, RunResult, VariedKeys, comparable, varied_keys
from hpctrain.run.directory import RunDirectory
from hpctrain.run.manifest import value_text


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean of the best values of several runs, and how far they lie apart.

    Attributes:
        mean: arithmetic mean.
        deviation: the sample standard deviation, with n - 1 in the denominator; None for one run.
        lowest: the smallest value.
        highest: the largest value.
        count: the number of runs.
    """

    mean: float
    deviation: float | None
    lowest: float
    highest: float
    count: int


def spread_of(values: Sequence[float]) -> Spread:
    """Return the spread of finite values, at least one."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.mean(values), deviation, min(values), max(values), len(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedRow:
    """One run, or several that differ in nothing but `seed`.

    Attributes:
        rank: counted from 1; None for a row that is listed after the ranked ones, because its run failed, isn't
            finished, or has no value.
        values: the values of the keys by which the runs differ, typed; without `seed` in a row over seeds.
        runs: by seed; at least one.
        numbers: the metric's values in each of them.
        spread: of the best values; None for a run without one.
    """

    rank: int | None
    values: Mapping[str, Any]
    runs: tuple[RunResult, ...]
    numbers: tuple[MetricValue, ...]
    spread: Spread | None

    @property
    def label(self) -> str:
        """The varied keys with their values, as typed; the run's folder if nothing varies."""
        return (
            " ".join(f"{key}={value_text(value)}" for key, value in self.values.items())
            or self.runs[0].status.path.name
        )

    @property
    def best(self) -> float | None:
        """The best value; of several runs, the mean of their best values. None without one."""
        return None if self.spread is None else self.spread.mean

    @property
    def best_step(self) -> int | None:
        """The step of the best value; None for several runs."""
        return self.numbers[0].step if len(self.runs) == 1 else None

    @property
    def last(self) -> float | None:
        """The last value, which may be NaN or infinite; of several runs, the mean. None without one."""
        known = [number.last for number in self.numbers if number.last is not None]
        if len(known) == 1:
            return known[0]
        if not known:
            return None
        return statistics.mean(known) if all(map(math.isfinite, known)) else math.nan

    @property
    def step(self) -> int:
        """Completed steps; of several runs, the most."""
        return max(run.status.step for run in self.runs)

    @property
    def total_steps(self) -> int | None:
        """The step at which the run ends; of several runs, the largest. None if it is unknown."""
        return max((run.status.total_steps for run in self.runs if run.status.total_steps is not None), default=None)

    @property
    def seconds(self) -> float:
        """Training time, without steps that were repeated; of several runs, the mean."""
        return math.fsum(run.training_s for run in self.runs) / len(self.runs)

    @property
    def state(self) -> str:
        """The run's state; of several runs in different states, how many are in each."""
        states = Counter(str(run.status.state) for run in self.runs)
        if len(states) == 1:
            return next(iter(states))
        return ", ".join(f"{count} {state}" for state, count in states.items())

    @property
    def is_live(self) -> bool:
        """Whether a run of the row isn't finished, so that the values may change."""
        return any(run.is_live for run in self.runs)

    @property
    def directories(self) -> tuple[RunDirectory, ...]:
        """The runs' directories."""
        return tuple(run.directory for run in self.runs)

    @property
    def seeds(self) -> tuple[Any, ...]:
        """The runs' seeds; None for a run without one."""
        return tuple(run.config.get(SEED) for run in self.runs)


@dataclass(frozen=True, slots=True)
class Ranking:
    """Runs, best first.

    Attributes:
        metric: by which they are ranked; None if nothing ranks them: then no row has a rank.
        keys: the keys by which the runs differ.
        rows: the ranked ones, best first; then runs that failed, aren't finished or have no value.
    """

    metric: RankingMetric | None
    keys: tuple[str, ...]
    rows: tuple[RankedRow, ...]

    @property
    def winner(self) -> RankedRow | None:
        """The best row; None if no run has a rank."""
        return self.rows[0] if self.rows and self.rows[0].rank is not None else None


def rank(results: Sequence[RunResult], metric: RankingMetric | None) -> Ranking:
    """Rank runs by the best values of a metric.

    Args:
        results: of the runs.
        metric: None if there is none.
    """
    keys = varied_keys(results)
    ranked: dict[str, list[tuple[RunResult, MetricValue]]] = {}
    others = []
    for result in results:
        number = MetricValue() if metric is None else metric_value(result, metric)
        if result.counts and number.best is not None:
            ranked.setdefault(_group(keys, result), []).append((result, number))
        else:
            others.append(_row(keys, [(result, number)]))
    rows = [_row(keys, members) for members in ranked.values()]
    rows.sort(key=lambda row: _loss(row, metric))
    others.sort(key=lambda row: _loss(row, metric))
    placed = [replace(row, rank=number) for number, row in enumerate(rows, 1)]
    return Ranking(metric, keys.names, (*placed, *others))


def _group(keys: VariedKeys, result: RunResult) -> str:
    """What the runs of one row have in common; only readable runs differ in nothing but `seed`."""
    if SEED not in keys.names or not result.config:
        return str(result.status.path)
    return comparable({key: value for key, value in keys.values(result).items() if key != SEED})


def _row(keys: VariedKeys, members: Sequence[tuple[RunResult, MetricValue]]) -> RankedRow:
    members = sorted(members, key=lambda member: _seed_order(member[0]))
    values = keys.values(members[0][0])
    if len(members) > 1:
        values.pop(SEED, None)
    bests = [number.best for _, number in members if number.best is not None]
    return RankedRow(
        rank=None,
        values=values,
        runs=tuple(result for result, _ in members),
        numbers=tuple(number for _, number in members),
        spread=spread_of(bests) if bests else None,
    )


def _seed_order(result: RunResult) -> float:
    seed = result.config.get(SEED)
    return seed if isinstance(seed, int) else math.inf


def _loss(row: RankedRow, metric: RankingMetric | None) -> float:
    return math.inf if row.best is None or metric is None else metric.loss(row.best)

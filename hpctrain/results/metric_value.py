"""The value of a metric in one run."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

from hpctrain.config.checkpoint import EVAL_PREFIX
from hpctrain.results.ranking_metric import RankingMetric
from hpctrain.results.run_result import RunResult
from hpctrain.status.metrics import read_metrics


@dataclass(frozen=True, slots=True)
class MetricValue:
    """A metric's values in one run.

    Attributes:
        best: the best finite value; None without one.
        step: its step.
        last: the last value, which may be NaN or infinite; None without one.
    """

    best: float | None = None
    step: int | None = None
    last: float | None = None


def metric_value(result: RunResult, metric: RankingMetric) -> MetricValue:
    """Return a metric's best and last value in a run.

    metrics.jsonl is read in full only if the metric isn't the one by which the run is judged, or if the record of that
    one is missing.
    """
    best = result.status.best
    if best is not None and (EVAL_PREFIX + best.name, best.mode) == (metric.name, metric.mode):
        return MetricValue(best.value, result.status.best_step, result.status.metrics.get(metric.name))
    return _logged_value(result, metric)


def _logged_value(result: RunResult, metric: RankingMetric) -> MetricValue:
    best: float | None = None
    step = last = None
    with contextlib.suppress(OSError):  # such a run has no value
        for record in read_metrics(result.directory.metrics):
            value = record.values.get(metric.name)
            if value is None:
                continue
            last = value
            if math.isfinite(value) and (best is None or metric.loss(value) < metric.loss(best)):
                best, step = value, record.step
    return MetricValue(best, step, last)

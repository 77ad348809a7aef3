"""The metric by which runs are ranked: the one by which they are judged, or one that the user names; and its values."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpctrain.config.checkpoint import EVAL_PREFIX
from hpctrain.errors import ConfigError, RunDirectoryError
from hpctrain.phrases import counted, listed
from hpctrain.results.run_result import RunResult
from hpctrain.run.config_change import trained_config
from hpctrain.run.evaluation import MODES
from hpctrain.status.metrics import read_metrics


@dataclass(frozen=True, slots=True)
class RankingMetric:
    """A metric by which runs are compared.

    Attributes:
        name: as logged, such as `eval/accuracy`.
        mode: `min` or `max`: which values are better.
    """

    name: str
    mode: str

    def loss(self, value: float) -> float:
        """The value; negated if larger values are better."""
        return value if self.mode == "min" else -value


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


def judging_metric(results: Sequence[RunResult]) -> RankingMetric:
    """Return the metric by which the runs are judged: `checkpoint.metric`, or the task's own.

    Raises:
        RunDirectoryError: they are judged by different metrics, or none was evaluated.
    """
    found = Counter(_judged(results))
    if not found:
        found = Counter(_configured(results))
    if not found:
        raise RunDirectoryError(_unjudged(results))
    if len(found) > 1:
        parts = [f"{one.name} ({one.mode}, {counted(count, 'run')})" for one, count in found.most_common()]
        example = found.most_common(1)[0][0].name.removeprefix(EVAL_PREFIX)
        raise RunDirectoryError(
            f"the runs are judged by different metrics: {listed(parts)}; name the one to compare, such as "
            f"--metric {example}, or name runs with the same metric"
        )
    return next(iter(found))


def named_metric(results: Sequence[RunResult], name: str, mode: str | None) -> RankingMetric:
    """Return the metric that the user names.

    Args:
        results: of the runs.
        name: as logged, or without `eval/`.
        mode: `min` or `max`; None for what the runs' records say.

    Raises:
        ConfigError: no run logged it, or nothing says which of its values are better.
    """
    logged = _resolved(results, name)
    mode = mode or _known_mode(results, logged)
    if mode is None:
        problem = "nothing in the runs says whether lower or higher values are better"
        raise ConfigError("--metric", name, problem, "add --mode min or --mode max")
    return RankingMetric(logged, mode)


def _judged(results: Iterable[RunResult]) -> Iterable[RankingMetric]:
    bests = (result.status.best for result in results)
    return (RankingMetric(EVAL_PREFIX + best.name, best.mode) for best in bests if best is not None)


def _configured(results: Iterable[RunResult]) -> Iterable[RankingMetric]:
    """Yield the metric that each run's configuration names, of runs that logged it: old runs have no other record."""
    known: dict[str, RankingMetric | None] = {}
    for result in results:
        if result.is_program or not result.config:
            continue
        keys = ("task._target_", "checkpoint.metric", "checkpoint.metric_mode")
        kind = repr([result.config.get(key) for key in keys])
        if kind not in known:
            known[kind] = _metric_of_config(result)
        metric = known[kind]
        if metric is not None and metric_value(result, metric).best is not None:
            yield metric


def _metric_of_config(result: RunResult) -> RankingMetric | None:
    # OmegaConf is slow to import, and runs of this version don't need it
    from hpctrain.config.stored import load
    from hpctrain.config.task_checks import metric_mode, metric_name

    with contextlib.suppress(ConfigError):
        config = load(trained_config(result.directory), only=("name", "task", "checkpoint"))
        name, mode = metric_name(config), metric_mode(config)
        if name is not None and mode is not None:
            return RankingMetric(EVAL_PREFIX + name, mode)
    return None


def _unjudged(results: Sequence[RunResult]) -> str:
    names = listed(sorted(_recent_names(results) - {"train/epoch", "train/lr"}), shown=6)
    what = "no run has been evaluated by a metric that ranks it"
    if all(result.is_program for result in results):
        what = "a program's run has no metric of its own to be ranked by"
    if not names:
        return f"{what}, and none has logged anything yet; `python -m hpctrain status` shows how far the runs are"
    return f"{what}; name one that was logged with --metric NAME --mode min or max: {names}"


def _resolved(results: Sequence[RunResult], name: str) -> str:
    # the last records have nearly every name; only if one isn't there, all records are read
    for known in (_recent_names(results), _all_names(results)):
        for logged in (name, EVAL_PREFIX + name):
            if logged in known:
                return logged
    names = _all_names(results)
    near = difflib.get_close_matches(name, [*names, *(one.removeprefix(EVAL_PREFIX) for one in names)], n=1)
    remedy = f"did you mean {near[0]}? " if near else ""
    remedy += f"logged: {listed(sorted(names))}" if names else "the runs have logged nothing"
    raise ConfigError("--metric", name, "no run logged it", remedy)


def _recent_names(results: Iterable[RunResult]) -> set[str]:
    return {name for result in results for name in result.status.metrics}


def _all_names(results: Iterable[RunResult]) -> set[str]:
    names: set[str] = set()
    for result in results:
        with contextlib.suppress(OSError):
            for record in read_metrics(result.directory.metrics):
                names.update(record.values)
    return names


def _known_mode(results: Sequence[RunResult], logged: str) -> str | None:
    modes: set[object] = {metric.mode for metric in _judged(results) if metric.name == logged}
    for result in results:
        configured = result.config.get("checkpoint.metric")
        if configured is not None and EVAL_PREFIX + str(configured) == logged:
            modes.add(result.config.get("checkpoint.metric_mode"))
    modes.discard(None)
    if len(modes) == 1:
        mode = modes.pop()
        return str(mode) if mode in MODES else None
    return "min" if logged.rpartition("/")[2] == "loss" else None

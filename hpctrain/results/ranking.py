"""The runs of a sweep by a metric, best first, with the spread over runs that differ only in `seed`."""

from __future__ import annotations

import contextlib
import difflib
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpctrain.config.checkpoint import EVAL_PREFIX
from hpctrain.errors import ConfigError, RunDirectoryError
from hpctrain.phrases import counted, listed
from hpctrain.results.run_result import SEED, RunResult, VariedKeys, comparable, varied_keys
from hpctrain.run.config_change import trained_config
from hpctrain.run.evaluation import MODES
from hpctrain.run.manifest import value_text
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
    run_value = MetricValue()
    with contextlib.suppress(OSError):  # such a run has no value
        for record in read_metrics(result.directory.metrics):
            if (value := record.values.get(metric.name)) is None:
                continue
            run_value = replace(run_value, last=value)
            if math.isfinite(value) and (run_value.best is None or metric.loss(value) < metric.loss(run_value.best)):
                run_value = MetricValue(value, record.step, value)
    return run_value


def judging_metric(results: Sequence[RunResult]) -> RankingMetric:
    """Return the metric by which the runs are judged: `checkpoint.metric`, or the task's own.

    Raises:
        RunDirectoryError: they are judged by different metrics, or none was evaluated.
    """
    metrics = Counter(_judging_metrics(results)) or Counter(_configured(results))
    if not metrics:
        raise RunDirectoryError(_describe_missing_metric(results))
    if len(metrics) > 1:
        parts = [f"{metric.name} ({metric.mode}, {counted(count, 'run')})" for metric, count in metrics.most_common()]
        example = metrics.most_common(1)[0][0].name.removeprefix(EVAL_PREFIX)
        raise RunDirectoryError(
            f"the runs are judged by different metrics: {listed(parts)}; name the one to compare, such as "
            f"--metric {example}, or name runs with the same metric"
        )
    return next(iter(metrics))


def named_metric(results: Sequence[RunResult], name: str, mode: str | None) -> RankingMetric:
    """Return the metric that the user names.

    Args:
        results: of the runs.
        name: as logged, or without `eval/`.
        mode: `min` or `max`; None for what the runs' records say.

    Raises:
        ConfigError: no run logged it, or nothing says which of its values are better.
    """
    full_name = _full_metric_name(results, name)
    mode = mode or _known_mode(results, full_name)
    if mode is None:
        problem = "nothing in the runs says whether lower or higher values are better"
        raise ConfigError("--metric", name, problem, "add --mode min or --mode max")
    return RankingMetric(full_name, mode)


def _judging_metrics(results: Iterable[RunResult]) -> Iterable[RankingMetric]:
    bests = (result.status.best for result in results)
    return (RankingMetric(EVAL_PREFIX + best.name, best.mode) for best in bests if best is not None)


def _configured(results: Iterable[RunResult]) -> Iterable[RankingMetric]:
    """Yield the metric that each run's configuration names, of runs that logged it: old runs have no other record."""
    metric_by_kind: dict[str, RankingMetric | None] = {}
    for result in results:
        if result.is_program or not result.config:
            continue
        keys = ("task._target_", "checkpoint.metric", "checkpoint.metric_mode")
        kind = repr([result.config.get(key) for key in keys])
        if kind not in metric_by_kind:
            metric_by_kind[kind] = _metric_of_config(result)
        metric = metric_by_kind[kind]
        if metric is not None and metric_value(result, metric).best is not None:
            yield metric


def _metric_of_config(result: RunResult) -> RankingMetric | None:
    # OmegaConf is slow to import, and runs of this version don't need it
    from hpctrain.config.stored import load
    from hpctrain.config.task_checks import metric_mode, metric_name

    with contextlib.suppress(ConfigError):
        config = load(trained_config(result.directory), keys=("name", "task", "checkpoint"))
        name, mode = metric_name(config), metric_mode(config)
        if name is not None and mode is not None:
            return RankingMetric(EVAL_PREFIX + name, mode)
    return None


def _describe_missing_metric(results: Sequence[RunResult]) -> str:
    names = listed(sorted(_recent_names(results) - {"train/epoch", "train/lr"}), max_names=6)
    what = "no run has been evaluated by a metric that ranks it"
    if all(result.is_program for result in results):
        what = "a program's run has no metric of its own to be ranked by"
    if not names:
        return f"{what}, and none has logged anything yet; `python -m hpctrain status` shows how far the runs are"
    return f"{what}; name one that was logged with --metric NAME --mode min or max: {names}"


def _full_metric_name(results: Sequence[RunResult], name: str) -> str:
    # the last records have nearly every name; only if one isn't there, all records are read
    for read_names in (_recent_names, _all_names):
        names = read_names(results)
        for candidate in (name, EVAL_PREFIX + name):
            if candidate in names:
                return candidate
    near = difflib.get_close_matches(name, [*names, *(full_name.removeprefix(EVAL_PREFIX) for full_name in names)], n=1)
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


def _known_mode(results: Sequence[RunResult], full_name: str) -> str | None:
    modes: set[object] = {metric.mode for metric in _judging_metrics(results) if metric.name == full_name}
    for result in results:
        metric_name = result.config.get("checkpoint.metric")
        if metric_name is not None and EVAL_PREFIX + str(metric_name) == full_name:
            modes.add(result.config.get("checkpoint.metric_mode"))
    modes.discard(None)
    if len(modes) == 1:
        mode = modes.pop()
        return str(mode) if mode in MODES else None
    return "min" if full_name.rpartition("/")[2] == "loss" else None


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean of the best values of several runs, and how far they lie apart.

    Attributes:
        mean: arithmetic mean.
        deviation: the sample standard deviation, with n - 1 in the denominator; None for one run.
        lowest: the smallest value.
        highest: the largest value.
    """

    mean: float
    deviation: float | None
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedRow:
    """One run, or several that differ in nothing but `seed`.

    Attributes:
        rank: counted from 1; None for a row that is listed after the ranked ones, because its run failed, isn't
            finished, or has no value.
        values: the values of the keys by which the runs differ, typed; without `seed` in a row over seeds.
        runs: by seed; at least one.
        metric_values: the metric's values in each of them.
        spread: of the best values; None for a run without one.
    """

    rank: int | None
    values: Mapping[str, Any]
    runs: tuple[RunResult, ...]
    metric_values: tuple[MetricValue, ...]
    spread: Spread | None

    @property
    def label(self) -> str:
        """The varied keys with their values, as typed; the run's folder if nothing varies."""
        varied = " ".join(f"{key}={value_text(value)}" for key, value in self.values.items())
        return varied or self.runs[0].status.path.name

    @property
    def best(self) -> float | None:
        """The best value; of several runs, the mean of their best values. None without one."""
        return None if self.spread is None else self.spread.mean

    @property
    def best_step(self) -> int | None:
        """The step of the best value; None for several runs."""
        return self.metric_values[0].step if len(self.runs) == 1 else None

    @property
    def last(self) -> float | None:
        """The last value, which may be NaN or infinite; of several runs, the mean. None without one."""
        values = [value.last for value in self.metric_values if value.last is not None]
        return statistics.mean(values) if values else None

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
        return math.fsum(run.status.account.spent.training_s for run in self.runs) / len(self.runs)

    @property
    def state(self) -> str:
        """The run's state; of several runs in different states, how many are in each."""
        states = Counter(str(run.status.state) for run in self.runs)
        if len(states) == 1:
            return next(iter(states))
        return ", ".join(f"{count} {state}" for state, count in states.items())

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
    groups: dict[str, list[tuple[RunResult, MetricValue]]] = {}
    unranked_rows = []
    for result in results:
        run_value = MetricValue() if metric is None else metric_value(result, metric)
        if result.counts and run_value.best is not None:
            groups.setdefault(_group(keys, result), []).append((result, run_value))
        else:
            unranked_rows.append(_row(keys, [(result, run_value)]))
    rows = [_row(keys, members) for members in groups.values()]
    rows.sort(key=lambda row: _loss(row, metric))
    unranked_rows.sort(key=lambda row: _loss(row, metric))
    ranked_rows = [replace(row, rank=number) for number, row in enumerate(rows, 1)]
    return Ranking(metric, keys.names, (*ranked_rows, *unranked_rows))


def _group(keys: VariedKeys, result: RunResult) -> str:
    """Return a text that the runs of one row share; only readable runs differ in nothing but `seed`."""
    if SEED not in keys.names or not result.config:
        return str(result.status.path)
    return comparable({key: value for key, value in keys.values(result).items() if key != SEED})


def _row(keys: VariedKeys, members: Sequence[tuple[RunResult, MetricValue]]) -> RankedRow:

    def seed_of(member: tuple[RunResult, MetricValue]) -> float:
        seed = member[0].config.get(SEED)
        return seed if isinstance(seed, int) else math.inf

    members = sorted(members, key=seed_of)
    values = keys.values(members[0][0])
    if len(members) > 1:
        values.pop(SEED, None)
    bests = [run_value.best for _, run_value in members if run_value.best is not None]
    spread = None
    if bests:
        deviation = statistics.stdev(bests) if len(bests) > 1 else None
        spread = Spread(statistics.mean(bests), deviation, min(bests), max(bests))
    return RankedRow(
        rank=None,
        values=values,
        runs=tuple(result for result, _ in members),
        metric_values=tuple(run_value for _, run_value in members),
        spread=spread,
    )


def _loss(row: RankedRow, metric: RankingMetric | None) -> float:
    return math.inf if row.best is None or metric is None else metric.loss(row.best)

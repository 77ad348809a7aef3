"""What one evaluation finds: sums, the states of metric objects, and values per sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from hpctrain.config.checkpoint import EVAL_PREFIX
from hpctrain.distributed.world import World
from hpctrain.errors import ConfigError, HpctrainError, TaskError, error_text
from hpctrain.phrases import counted, listed
from hpctrain.tasks.evaluation_contract import checked_results, checked_scores, checked_values
from hpctrain.tasks.task import Task
from hpctrain.train.gathering import Gathering, Values
from hpctrain.train.meters import meter_of
from hpctrain.train.rank_comparison import RankComparison
from hpctrain.train.task_log import AttachedLog
from hpctrain.train.task_metrics import TaskMetrics

MB = 2**20


class OnRankZeroError(TaskError):
    """The task's own code failed on rank zero; raised on the other ranks.

    Attributes:
        is_of_values: whether rank zero's error was one of arithmetic or of a wrong value.
    """

    def __init__(self, message: str, *, is_of_values: bool) -> None:
        self.is_of_values = is_of_values
        super().__init__(message, elsewhere=True)


class EvaluationResults:
    """Collects what `Task.evaluate` returns on this rank, and reduces it over all ranks at the end.

    Args:
        task: that is evaluated.
        metrics: of the task; reset here.
        task_log: of the task.
        world: the ranks.
        max_gathered_mb: bound on what rank zero gets (`trainer.max_gathered_mb`).

    Attributes:
        doing: the task's own code that runs, or ran last, for messages.
    """

    def __init__(
        self, task: Task, metrics: TaskMetrics, task_log: AttachedLog, world: World, *, max_gathered_mb: int
    ) -> None:
        self.doing = ""
        self._task = task
        self._kind = type(task).__name__
        self._metrics = metrics
        self._task_log = task_log
        self._world = world
        self._max_mb = max_gathered_mb
        self._meter = meter_of(world)
        self._summed: set[str] = set()
        self._has_batches = False
        self._gathering = Gathering(f"{self._kind}.evaluate", world)
        self._samples: dict[str, Values] = {}
        self._num_samples = 0
        metrics.reset()

    @property
    def is_full(self) -> bool:
        """Whether this rank alone has more than rank zero may get, so that the evaluation can end."""
        room = self._max_mb * MB - self._gathering.num_bytes
        return room < 0 or self._metrics.exceeds(room)

    def add(self, round_index: int, num_samples: int, returned: Any, *, weight: float | None = None) -> None:
        """Add what `Task.evaluate` returned for a batch; not collective.

        Args:
            round_index: which round of the evaluation it is, from 0.
            num_samples: of the batch.
            returned: unchecked.
            weight: of the values that the task logged; None: ``num_samples``.

        Raises:
            TaskError: `evaluate` broke its contract.
        """
        found = checked_results(self._task, returned, num_samples)
        self._has_batches = True
        for name, (total, count) in found.sums.items():
            self._meter.add_sum(f"{EVAL_PREFIX}{name}", total, count)
            self._summed.add(f"{EVAL_PREFIX}{name}")
        if self._task_log.scalars:
            count = num_samples if weight is None else weight
            self._task_log.add_to_meter(self._meter, count, (*found.sums, *found.per_sample))
        # ranks that compute layers together have the same results
        if self._world.counts_samples:
            self._gathering.add(round_index, num_samples, found.per_sample)
            self._num_samples += num_samples

    def require_room(self, num_samples: int | None = None) -> None:
        """Refuse more than rank zero may get; collective.

        Args:
            num_samples: of the whole evaluation, if this is only its beginning; None for what was added so far.

        Raises:
            ConfigError: it is more than `trainer.max_gathered_mb`.
        """
        growing, constant = self._metrics.num_gathered_bytes
        own = [self._num_samples, self._gathering.num_bytes + growing, constant, int(self.is_full)]
        own = own if self._world.counts_samples else [0] * len(own)
        gathered = self._world.gather(own)
        totals = None if gathered is None else [sum(column) for column in zip(*gathered, strict=True)]
        seen, growing, constant, is_full = self._world.broadcast(totals)
        per_sample = growing / max(seen, 1)
        expected = constant + (growing if num_samples is None else per_sample * num_samples)
        if expected <= self._max_mb * MB:
            return
        samples = counted(seen if num_samples is None else num_samples, "sample")
        others = f", and {constant} bytes of states that do not grow" if constant else ""
        needed = math.ceil(expected / MB)
        # a rank that is full ends the evaluation
        is_beginning = is_full and num_samples is None
        found, enough = (f"at least {needed}", f"more than {needed}") if is_beginning else (needed, needed)
        raise ConfigError(
            "trainer.max_gathered_mb",
            self._max_mb,
            f"rank zero would get {found} MB, {per_sample:.0f} bytes for each of {samples}{others}",
            f"set it to {enough}, or keep less per sample in {self._kind}.evaluate",
        )

    def reduce(self, *, interleaved: bool, compare_names: bool) -> dict[str, float]:
        """Reduce everything over all ranks; collective, and only once.

        Args:
            interleaved: as `Gathering.gather` takes it.
            compare_names: whether to refuse ranks whose `evaluate` returned other metrics.

        Returns:
            The means by logged name.

        Raises:
            TaskError: names, metric objects or per-sample values differ between ranks.
        """
        # any rank, even rank zero, may have no samples, and then doesn't know the names
        # only what `evaluate` returns is in every result: a logged mean over no samples is left out
        names = self._world.union(sorted(self._summed))
        if compare_names:
            record = RankComparison(self._world)
            own = sorted(self._summed) if self._has_batches else names
            shown = listed(name.removeprefix(EVAL_PREFIX) for name in own) or "none"
            remedy = "return the same metrics for every batch, with a count of 0 where there is nothing to count"
            record.add(f"the metrics of {self._kind}.evaluate", shown, remedy)
            record.require_same()
        self._meter.expect(names)
        self._metrics.reduce()
        self._samples = self._gathering.gather(interleaved=interleaved) or {}
        return self._meter.means()

    def computed(self, means: Mapping[str, float]) -> dict[str, float]:
        """Compute all other metrics, with the task's own code; collective, after `reduce`.

        Args:
            means: by logged name.

        Returns:
            By logged name.

        Raises:
            TaskError: the task broke its contract.
            OnRankZeroError: the task's code failed on rank zero.
        """
        plain = {name.removeprefix(EVAL_PREFIX): value for name, value in means.items()}
        others, error = self._on_rank_zero()
        self.doing = f"{self._kind}.derive"
        # after the last collective: `derive` may fail on a single rank
        derived = checked_values(self._task, self._task.derive(plain))
        if error is not None:
            self.doing = f"{self._kind}.compute_metrics, or a metric of {self._kind}.build_metrics,"
            raise error
        self._require_own_names({**plain, **derived}, others)
        return {f"{EVAL_PREFIX}{name}": value for name, value in {**derived, **others}.items()}

    def _on_rank_zero(self) -> tuple[dict[str, float], Exception | None]:
        """Compute on rank zero; return the result, or an error, on every rank; collective."""
        values: dict[str, float] = {}
        error: Exception | None = None
        if self._world.is_rank_zero:
            try:
                values = self._scored()
            except Exception as caught:
                # every rank must learn of the error before any of them raises
                error = caught
        text = None if error is None else f"on rank zero: {type(error).__name__}: {error_text(error)}"
        kinds = isinstance(error, ArithmeticError | ValueError), isinstance(error, HpctrainError)
        values, text, (is_of_values, is_of_ours) = self._world.broadcast((values, text, kinds))
        if error is None and text is not None:
            error = TaskError(text, elsewhere=True) if is_of_ours else OnRankZeroError(text, is_of_values=is_of_values)
        return values, error

    @torch.no_grad()
    def _scored(self) -> dict[str, float]:
        values = self._metrics.compute()
        scores = checked_scores(self._task, self._task.compute_metrics(self._samples)) if self._samples else {}
        self._require_own_names(values, scores)
        return {**values, **scores}

    def _require_own_names(self, some: Mapping[str, float], others: Mapping[str, float]) -> None:
        if both := sorted(some.keys() & others.keys()):
            raise TaskError(f"{self._kind} has two metrics by the name {both[0]!r}: rename one of them")

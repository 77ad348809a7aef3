"""The results of one evaluation: sums, the states of metric objects, and values per sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hpctrain.config.checkpoint import EVAL_PREFIX
from hpctrain.errors import ConfigError, HpctrainError, TaskError, error_text
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.phrases import counted, listed
from hpctrain.tasks.contract import checked_results, checked_scores, checked_values
from hpctrain.tasks.task import Task
from hpctrain.train.rank_comparison import RankComparison
from hpctrain.train.task_log import AttachedLog, build_meter
from hpctrain.train.task_metrics import TaskMetrics

MB = 2**20

Values: TypeAlias = Tensor | list[Tensor]
"""Of a batch or of all samples: a tensor of shape [n, ...], or n tensors."""


class OnRankZeroError(TaskError):
    """The task's own code failed on rank zero; raised on the other ranks.

    Attributes:
        is_value_error: whether rank zero's error was one of arithmetic or of a wrong value.
    """

    def __init__(self, message: str, *, is_value_error: bool) -> None:
        self.is_value_error = is_value_error
        super().__init__(message, elsewhere=True)


@dataclass(eq=False)
class EvaluationResults:
    """Collects what `Task.evaluate` returns on this rank, and reduces it over all ranks at the end.

    Attributes:
        task: that is evaluated.
        metrics: of the task, reset.
        task_log: of the task.
        world: the ranks.
        max_gathered_mb: bound on what rank zero gets (`trainer.max_gathered_mb`).
        doing: the task's own code that runs, or ran last, for messages.
        is_full: whether this rank alone has more than rank zero may get, so that the evaluation can end.
    """

    task: Task
    metrics: TaskMetrics
    task_log: AttachedLog
    world: TrainingWorld
    _: KW_ONLY
    max_gathered_mb: int
    doing: str = field(default="", init=False)
    is_full: bool = field(default=False, init=False)
    _summed: set[str] = field(default_factory=set, init=False)
    _num_batches: int = field(default=0, init=False)
    _samples: dict[str, Values] = field(default_factory=dict, init=False)
    _num_samples: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._kind = type(self.task).__name__
        self._meter = build_meter(self.world)
        self._gathering = Gathering(f"{self._kind}.evaluate", self.world)

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
        checked = checked_results(self.task, returned, num_samples)
        self._num_batches += 1
        for name, (total, count) in checked.sums.items():
            self._meter.add_sum(f"{EVAL_PREFIX}{name}", total, count)
            self._summed.add(f"{EVAL_PREFIX}{name}")
        if self.task_log.scalars:
            count = num_samples if weight is None else weight
            self.task_log.add_to_meter(self._meter, count, (*checked.sums, *checked.per_sample))
        # ranks that compute layers together have the same results
        if self.world.share.is_counted:
            self._gathering.add(round_index, num_samples, checked.per_sample)
            self._num_samples += num_samples
        room = self.max_gathered_mb * MB - self._gathering.num_bytes
        # the states of metric objects are counted after the 1st, 2nd, 4th, 8th ... batch: each count visits them all
        counts_states = self._num_batches & (self._num_batches - 1) == 0
        self.is_full |= room < 0 or (counts_states and sum(self.metrics.num_gathered_bytes) > room)

    def require_room(self, num_samples: int | None = None) -> None:
        """Refuse results that are more than rank zero may get; collective.

        Args:
            num_samples: of the whole evaluation, if this is only its beginning; None for what was added so far.

        Raises:
            ConfigError: it is more than `trainer.max_gathered_mb`.
        """
        growing, constant = self.metrics.num_gathered_bytes
        sizes = [self._num_samples, self._gathering.num_bytes + growing, constant, int(self.is_full)]
        # ranks that compute layers together have the same results
        num_gathered, growing, constant, is_full = self.world.decide_on_rank_zero(
            sizes if self.world.share.is_counted else [0] * len(sizes),
            lambda gathered: [sum(column) for column in zip(*gathered, strict=True)],
        )
        per_sample = growing / max(num_gathered, 1)
        expected = constant + (growing if num_samples is None else per_sample * num_samples)
        if expected <= self.max_gathered_mb * MB:
            return
        samples = counted(num_gathered if num_samples is None else num_samples, "sample")
        constant_note = f", and {constant} bytes of states that do not grow" if constant else ""
        needed = math.ceil(expected / MB)
        # a rank that is full ends the evaluation early
        is_beginning = is_full and num_samples is None
        amount, enough = (f"at least {needed}", f"more than {needed}") if is_beginning else (needed, needed)
        raise ConfigError(
            "trainer.max_gathered_mb",
            self.max_gathered_mb,
            f"rank zero would get {amount} MB, {per_sample:.0f} bytes for each of {samples}{constant_note}",
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
        # Any rank, even rank zero, may have no samples, and then doesn't know the names. Only the sums that `evaluate`
        # returns are in every result: a logged mean over no samples is left out.
        names = self.world.union(sorted(self._summed))
        if compare_names:
            record = RankComparison(self.world)
            summed = sorted(self._summed) if self._num_batches else names
            metrics = listed(name.removeprefix(EVAL_PREFIX) for name in summed) or "none"
            remedy = "return the same metrics for every batch, with a count of 0 where there is nothing to count"
            record.add(f"the metrics of {self._kind}.evaluate", metrics, remedy)
            record.require_same()
        self._meter.expect(names)
        self.metrics.reduce()
        self._samples = self._gathering.gather(interleaved=interleaved) or {}
        return self._meter.means()

    def compute_others(self, means: Mapping[str, float]) -> dict[str, float]:
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
        rank_zero_values, error = self._on_rank_zero()
        self.doing = f"{self._kind}.derive"
        # after the last collective: `derive` may fail on a single rank
        derived = checked_values(self.task, self.task.derive(plain))
        if error is not None:
            self.doing = f"{self._kind}.compute_metrics, or a metric of {self._kind}.build_metrics,"
            raise error
        self._require_own_names({**plain, **derived}, rank_zero_values)
        return {f"{EVAL_PREFIX}{name}": value for name, value in {**derived, **rank_zero_values}.items()}

    def _on_rank_zero(self) -> tuple[dict[str, float], Exception | None]:
        """Compute on rank zero; return the result, or an error, on every rank; collective."""
        values: dict[str, float] = {}
        error: Exception | None = None
        if self.world.is_rank_zero:
            try:
                values = self._compute_scores()
            except Exception as caught:
                # every rank must learn of the error before any of them raises
                error = caught
        text = None if error is None else f"on rank zero: {type(error).__name__}: {error_text(error)}"
        kinds = isinstance(error, ArithmeticError | ValueError), isinstance(error, HpctrainError)
        values, text, (is_value_error, is_of_ours) = self.world.broadcast((values, text, kinds))
        if error is None and text is not None:
            error = (
                TaskError(text, elsewhere=True) if is_of_ours else OnRankZeroError(text, is_value_error=is_value_error)
            )
        return values, error

    @torch.no_grad()
    def _compute_scores(self) -> dict[str, float]:
        values = self.metrics.compute()
        scores = checked_scores(self.task, self.task.compute_metrics(self._samples)) if self._samples else {}
        self._require_own_names(values, scores)
        return {**values, **scores}

    def _require_own_names(self, first: Mapping[str, float], second: Mapping[str, float]) -> None:
        if duplicates := sorted(first.keys() & second.keys()):
            raise TaskError(f"{self._kind} has two metrics by the name {duplicates[0]!r}: rename one of them")


@dataclass(slots=True)
class _Column:
    """The values of one name on this rank.

    Attributes:
        form: whether each sample has a tensor of its own (`ragged`), `dtype` and `ndim` of the tensors, and the `shape`
            of a sample, None if they are ragged; as ranks compare them.
        parts: of shape [n, ...], a batch each; or a sample each.
    """

    form: dict[str, Any]
    parts: list[Tensor] = field(default_factory=list)

    @property
    def sizes(self) -> list[int]:
        """The shapes of all samples, one after the other, if they are ragged."""
        return [size for part in self.parts for size in part.shape] if self.form["ragged"] else []


class Gathering:
    """The per-sample values of one evaluation.

    Each rank keeps its own in host memory. A copy from a GPU is awaited when the next batch has been computed. Rank
    zero gets them through the group: a file per rank would need a fast shared file system, and cleaning up.

    Args:
        method: that returns them, for messages.
        world: the ranks.

    Attributes:
        num_bytes: of this rank's values so far.
    """

    def __init__(self, method: str, world: TrainingWorld) -> None:
        self.num_bytes = 0
        self._method = method
        self._world = world
        self._columns: dict[str, _Column] = {}
        self._is_empty = True
        self._rounds: list[int] = []
        self._counts: list[int] = []
        self._pending: list[tuple[_Column, Tensor]] = []
        self._copied: torch.cuda.Event | None = None

    def add(self, round_index: int, num_samples: int, per_sample: Mapping[str, Values]) -> None:
        """Keep the values of a batch; not collective.

        Args:
            round_index: which round of the evaluation it is, from 0.
            num_samples: of the batch.
            per_sample: one value for each of them.

        Raises:
            TaskError: names, types or shapes differ from those of earlier batches.
        """
        if self._is_empty:
            self._is_empty = False
            self._columns = {name: _Column(_form(values)) for name, values in per_sample.items()}
        elif per_sample.keys() != self._columns.keys():
            first, here = (listed(sorted(names)) or "none" for names in (self._columns, per_sample))
            raise TaskError(f"{self._method} must return the same PerSample for every batch: {first}, and later {here}")
        self._settle()
        if not per_sample:
            return
        self._rounds.append(round_index)
        self._counts.append(num_samples)
        for name, values in per_sample.items():
            column = self._columns[name]
            self._require_like(name, column, values)
            for tensor in values if isinstance(values, list) else [values]:
                self.num_bytes += tensor.numel() * tensor.element_size()
                # a copy: of a view, it would otherwise keep the whole; and the task may write into its own
                self._pending.append((column, tensor.detach().to("cpu", non_blocking=True, copy=True)))
        if self._world.device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def _settle(self) -> None:
        """Wait for the copies of the last batch."""
        copied, self._copied = self._copied, None
        if copied is not None:
            copied.synchronize()
        for column, tensor in self._pending:
            # a copy from a GPU is in pinned memory, which torch would keep for ever
            column.parts.append(tensor if copied is None else tensor.clone())
        self._pending = []

    def _require_like(self, name: str, column: _Column, values: Values) -> None:
        form, new_form = column.form, _form(values)
        if (new_form["ragged"], new_form["shape"]) != (form["ragged"], form["shape"]):
            before, now = (
                "tensors" if sample_form["ragged"] else f"shape {sample_form['shape']}"
                for sample_form in (form, new_form)
            )
            raise TaskError(
                f"{self._method}: samples of PerSample {name!r} have {before}, and later {now}: "
                "return a list of tensors where shapes differ"
            )
        for tensor in values if isinstance(values, list) else [values]:
            dtype = getattr(torch, form["dtype"])
            if (tensor.dtype, tensor.ndim) != (dtype, form["ndim"]):
                raise TaskError(
                    f"{self._method}: samples of PerSample {name!r} have {dtype} with {form['ndim']} dimensions, "
                    f"and later {tensor.dtype} with {tensor.ndim}"
                )

    def gather(self, *, interleaved: bool) -> dict[str, Values] | None:
        """All values at rank zero, in the order of the dataset; None on the other ranks; collective.

        Args:
            interleaved: whether batches follow each other in the dataset by round and then by rank, instead of the
                other way round.

        Raises:
            TaskError: the values of two ranks have other names, types or shapes.
        """
        self._settle()
        heads = self._world.gather(self._head())
        names, problem = self._world.broadcast(None if heads is None else _plan_gathering(heads))
        if problem:
            raise TaskError(f"{self._method}: {problem}")
        gathered: dict[str, Values] = {}
        for name in names:
            received = self._world.gather_bytes(self._pack(name))
            if received is not None and heads is not None:
                gathered[name] = _join(name, heads, received, interleaved=interleaved)
        return None if heads is None else gathered

    def _head(self) -> dict[str, Any]:
        columns = {name: {**column.form, "sizes": column.sizes} for name, column in self._columns.items()}
        return {"columns": columns, "rounds": self._rounds, "counts": self._counts}

    def _pack(self, name: str) -> Tensor:
        column = self._columns.pop(name, None)
        if column is None or not column.parts:
            return torch.empty(0, dtype=torch.uint8)
        return torch.cat([part.reshape(-1) for part in column.parts]).view(torch.uint8)


def _form(values: Values) -> dict[str, Any]:
    # an evaluation has no empty batches
    first = values if isinstance(values, Tensor) else values[0]
    ragged = first is not values
    dtype, shape = str(first.dtype).removeprefix("torch."), None if ragged else list(first.shape[1:])
    return {"ragged": ragged, "dtype": dtype, "shape": shape, "ndim": first.ndim}


def _plan_gathering(heads: list[dict[str, Any]]) -> tuple[list[str], str]:
    """Rank zero's decision: the names of what is gathered, or a problem."""
    # a rank without samples doesn't know the names
    columns_by_rank = [(rank, head["columns"]) for rank, head in enumerate(heads) if head["counts"]]
    if not columns_by_rank:
        return [], ""
    first, columns = columns_by_rank[0]
    for rank, other_columns in columns_by_rank[1:]:
        if other_columns.keys() != columns.keys():
            return [], f"ranks {first} and {rank} return PerSample under different names"
        for name, column in columns.items():
            for key in ("ragged", "dtype", "shape", "ndim"):
                if other_columns[name][key] != column[key]:
                    difference = (
                        f"{key}={column[key]} on rank {first} and {key}={other_columns[name][key]} on rank {rank}"
                    )
                    return [], f"PerSample {name!r} has {difference}"
    return sorted(columns), ""


def _join(name: str, heads: list[dict[str, Any]], received: list[Tensor], *, interleaved: bool) -> Values:
    batches: list[tuple[tuple[int, int], Values]] = []
    for rank, (head, data) in enumerate(zip(heads, received, strict=True)):
        if not head["counts"]:
            continue
        values = _unpack(head["columns"][name], data, sum(head["counts"]))
        begin = 0
        for round_index, count in zip(head["rounds"], head["counts"], strict=True):
            place = (round_index, rank) if interleaved else (rank, round_index)
            batches.append((place, values[begin : begin + count]))
            begin += count
    batches.sort(key=lambda batch: batch[0])
    parts = [values for _, values in batches]
    if isinstance(parts[0], list):
        return [tensor for values in parts for tensor in values]
    return torch.cat([values for values in parts if isinstance(values, Tensor)])


def _unpack(column: dict[str, Any], data: Tensor, num_samples: int) -> Values:
    flat = data.view(getattr(torch, column["dtype"]))
    if not column["ragged"]:
        return flat.view(num_samples, *column["shape"])
    ndim, sizes = column["ndim"], column["sizes"]
    shapes = [sizes[begin : begin + ndim] for begin in range(0, len(sizes), ndim)]
    pieces = torch.split(flat, [math.prod(shape) for shape in shapes])
    # copies, so that no sample keeps all others in memory
    return [piece.reshape(shape).clone() for piece, shape in zip(pieces, shapes, strict=True)]

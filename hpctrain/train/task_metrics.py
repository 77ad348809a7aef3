"""The metric objects of a task, hpctrain's own and torchmetrics', reduced over the ranks after an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.data.micro_batch import iterate_tensors, map_tensors
from hpctrain.errors import TaskError
from hpctrain.parallel.local_part import local_part
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.phrases import counted
from hpctrain.rank.message import pack, unpack
from hpctrain.tasks.contract import checked_computed, checked_metrics
from hpctrain.tasks.metric import Metric
from hpctrain.tasks.task import Task
from hpctrain.train.rank_comparison import RankComparison, describe_tensor
from hpctrain.train.task_state import copy_tensors

SAME_METRICS = "Task.build_metrics must return the same metrics on every rank"
ELEMENTWISE = ("sum", "min", "max")
"""Reductions that keep the shape of a state."""


@dataclass(frozen=True, slots=True)
class MetricState:
    """One state of one metric object.

    Attributes:
        owner: has it as an attribute.
        attribute: its name.
        default: its value at the start of an evaluation; None for a list, to which tensors are appended.
        reduction: `sum`, `min`, `max`, `mean`, `cat`, `stack` (an entry per rank), or a function of stacked states.
    """

    owner: Any
    attribute: str
    default: Tensor | None
    reduction: str | Callable[[Tensor], Any]

    @property
    def value(self) -> Any:
        """The current value: a tensor, or a list of tensors."""
        return getattr(self.owner, self.attribute)

    def replace(self, value: Any) -> None:
        """Give the owner another value."""
        setattr(self.owner, self.attribute, value)

    @property
    def device(self) -> torch.device | None:
        """The device where its owner keeps it; None for the rank's device."""
        # torchmetrics moves lists there after each update
        return torch.device("cpu") if getattr(self.owner, "compute_on_cpu", False) else None

    @property
    def is_elementwise(self) -> bool:
        """Whether the states of all ranks have one shape, and become one state of this shape."""
        return self.default is not None and self.reduction in ELEMENTWISE

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"{type(self.owner).__name__}.{self.attribute}"


def states_of(metric: Any) -> Iterator[MetricState]:
    """The states of a metric object and of those inside, in the same order on every rank."""
    if isinstance(metric, Metric):
        for name, default in metric.defaults.items():
            yield MetricState(metric, name, default, metric.reductions[name])
        return
    for owner in owners_of(metric):
        for name, default in owner._defaults.items():
            is_list = not isinstance(default, Tensor)
            reduction = owner._reductions[name]
            # torchmetrics keeps functions, such as dim_zero_sum, and None for "stack"
            kind = "stack" if reduction is None else getattr(reduction, "__name__", "").removeprefix("dim_zero_")
            has_name = kind in (*ELEMENTWISE, "mean", "cat", "stack")
            yield MetricState(owner, name, None if is_list else default, kind if has_name else reduction)


def owners_of(metric: Any) -> list[Any]:
    """The objects of torchmetrics that count their updates: the metric itself, and those inside; none for another."""
    if not isinstance(metric, nn.Module):
        return []
    modules = list(metric.modules())
    for module in modules:
        if hasattr(module, "_groups_checked"):
            # metrics of a collection that have the same states share them, and only the first one is updated
            collection: Any = module
            collection.values(copy_state=False)
    return [module for module in modules if hasattr(module, "_defaults") and hasattr(module, "_update_count")]


def num_updates(metric: Any) -> list[int]:
    """Return the number of updates of each of `owners_of` since its reset."""
    return [int(owner._update_count) for owner in owners_of(metric)]


def set_num_updates(metric: Any, counts: list[int]) -> None:
    """Set results of `num_updates`, added up over ranks: an object that was never updated warns when it computes."""
    for owner, count in zip(owners_of(metric), counts, strict=True):
        owner._update_count = count
        owner._computed = None


def merge_values(state: MetricState, values: list[Any]) -> Any:
    """Combine the values of a state that isn't elementwise.

    Args:
        state: of this rank.
        values: the values of the ranks that updated the owner, in rank order, also of a stream, whose own order is
            another one; on the CPU.
    """
    if state.default is None:
        return [tensor for tensors in values for tensor in tensors]
    if callable(state.reduction):
        return state.reduction(torch.stack(values))
    if len(values) == 1:
        return values[0]
    if state.reduction == "cat":
        return torch.cat([tensor.reshape(-1) if tensor.ndim == 0 else tensor for tensor in values])
    return torch.stack(values).mean(0) if state.reduction == "mean" else torch.stack(values)


def exact_bytes(states: Iterable[MetricState]) -> tuple[int, int]:
    """Return the bytes of states that grow with the samples, and of those that have the size of their default.

    Args:
        states: that rank zero gets as they are.
    """
    growing, constant = list[Any](), list[Any]()
    for state in states:
        has_default = state.default is not None and getattr(state.value, "shape", None) == state.default.shape
        (constant if has_default else growing).append(state.value)
    return num_bytes(growing), num_bytes(constant)


def num_bytes(values: list[Any]) -> int:
    """Return the bytes of all tensors in containers, each once: metrics of a collection share their states."""
    tensors = {id(tensor): tensor for tensor in iterate_tensors(values)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class TaskMetrics:
    """The metric objects of a task.

    Args:
        metrics: by name, on the rank's device, without a synchronisation of their own.
        task: has made them.
        world: the ranks.
    """

    def __init__(self, metrics: dict[str, Any], task: Task, world: TrainingWorld) -> None:
        self._task = task
        self._world = world
        self._metrics = metrics
        self._num_copied: dict[tuple[int, str], int] = {}

    def add_to(self, comparison: RankComparison) -> None:
        """Add the metric objects and their states to what the ranks compare, before the first update."""
        for name, metric in self._metrics.items():
            comparison.add(f"the metric {name}", type(metric).__qualname__, SAME_METRICS)
            for state in states_of(metric):
                default = "a list" if state.default is None else describe_tensor(state.default)
                comparison.add(f"the metric {name}: {state.name}", default, SAME_METRICS)

    def reset(self) -> None:
        """Begin an evaluation, or forget one."""
        self._num_copied.clear()
        for metric in self._metrics.values():
            metric.reset()

    def copy_shared(self, model: nn.Module) -> None:
        """Copy the states that share memory with the model since the last update: the model's values change later.

        Args:
            model: as the update got it.
        """
        if not self._metrics:
            return
        of_model = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())}

        def copy(tensor: Tensor) -> Tensor:
            return tensor.detach().clone() if _memory(tensor) in of_model else tensor

        for state in self._states():
            entries, key = state.value, (id(state.owner), state.attribute)
            if isinstance(entries, list):
                begin = self._num_copied.get(key, 0)
                entries[begin:] = map_tensors(copy, entries[begin:])
                self._num_copied[key] = len(entries)
            elif isinstance(entries, Tensor) and _memory(entries) in of_model:
                state.replace(copy(entries))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore this rank's states after the context."""
        states = [(state, map_tensors(torch.clone, state.value)) for state in self._states()]
        counts = {name: num_updates(metric) for name, metric in self._metrics.items()}
        try:
            yield
        finally:
            for state, value in states:
                state.replace(value)
            for name, metric in self._metrics.items():
                set_num_updates(metric, counts[name])
            self._num_copied.clear()

    @property
    def num_gathered_bytes(self) -> tuple[int, int]:
        """Bytes of this rank's states that rank zero will get as they are: of those that grow, and of the others."""
        return exact_bytes(state for state in self._states() if not state.is_elementwise)

    def reduce(self) -> None:
        """Give rank zero's objects the states of all ranks; collective.

        Rank zero alone computes: otherwise the states of curves would be sent to every rank.

        Raises:
            TaskError: the ranks have different metrics, or states that can't be added up.
        """
        if not self._metrics or self._world.size == 1:
            return
        if not self._world.share.is_counted:
            # ranks that compute layers together have the same results, and one of them counts
            self.reset()
        states = list(self._states())
        updates = [count for metric in self._metrics.values() for count in num_updates(metric)]
        elementwise = [state for state in states if state.is_elementwise]
        gathered_states = [state for state in states if not state.is_elementwise]
        plan = self._agree(elementwise, gathered_states, updates)
        values_by_rank = self._gather(gathered_states) if gathered_states else None
        self._reduce_elementwise(elementwise, plan)
        if not self._world.is_rank_zero:
            return
        if values_by_rank is not None:
            self._merge(gathered_states, values_by_rank)
        totals = iter(plan["updates"])
        for metric in self._metrics.values():
            set_num_updates(metric, [next(totals) for _ in num_updates(metric)])

    @torch.no_grad()
    def compute(self) -> dict[str, float]:
        """Compute the metrics, on rank zero after `reduce`.

        Raises:
            TaskError: one computes something else than numbers.
        """
        values: dict[str, float] = {}
        for name, metric in self._metrics.items():
            values |= checked_computed(self._task, name, metric.compute())
        return values

    def _states(self) -> list[MetricState]:
        return [state for metric in self._metrics.values() for state in states_of(metric)]

    def _agree(
        self, elementwise: Sequence[MetricState], gathered_states: Sequence[MetricState], updates: list[int]
    ) -> Any:
        """Exchange what may differ from the defaults: the states' shapes and types, and the numbers of updates."""
        names = [f"{name}: {state.name}" for name, metric in self._metrics.items() for state in states_of(metric)]
        shapes = [list(state.value.shape) for state in elementwise]
        dtypes = [str(state.value.dtype).removeprefix("torch.") for state in elementwise]
        forms = [_form(state) for state in gathered_states]
        facts = {"names": names, "shapes": shapes, "dtypes": dtypes, "updates": updates, "forms": forms}
        plan = self._world.decide_on_rank_zero(
            facts, partial(_plan_reduction, elementwise=elementwise, gathered_states=gathered_states)
        )
        if plan["problem"]:
            raise TaskError(f"{type(self._task).__name__}.metrics: {plan['problem']}")
        return plan

    @torch.no_grad()
    def _reduce_elementwise(self, states: Sequence[MetricState], plan: Any) -> None:
        """Reduce states with one collective for each operation and kind of number."""
        dtypes = [getattr(torch, name) for name in plan["dtypes"]]
        targets = list(zip(states, plan["shapes"], dtypes, strict=True))
        for operation in ELEMENTWISE:
            for wide in (torch.float64, torch.int64):
                chosen = [
                    target
                    for target in targets
                    if target[0].reduction == operation and target[2].is_floating_point is wide.is_floating_point
                ]
                if chosen:
                    self._reduce(operation, chosen, wide)

    def _reduce(
        self, operation: str, chosen: list[tuple[MetricState, list[int], torch.dtype]], wide: torch.dtype
    ) -> None:
        parts = []
        for state, shape, _ in chosen:
            value = state.value.detach().to(wide).expand(shape)
            # the default of a sum counts once, and not once per rank
            parts.append(value - _default(state).to(wide) if operation == "sum" else value)
        flat = torch.cat([part.reshape(-1) for part in parts]).cpu()
        pieces = torch.split(self._world.combine_(flat, operation), [part.numel() for part in parts])
        for (state, shape, dtype), piece in zip(chosen, pieces, strict=True):
            total = piece.view(shape).to(self._world.device)
            if operation == "sum":
                total = total + _default(state).to(wide)
            state.replace(total.to(dtype))

    def _gather(self, states: Sequence[MetricState]) -> list[Any] | None:
        """The values of states at rank zero, by rank; None in the place of an object that a rank didn't update."""
        values = [state.value if getattr(state.owner, "_update_count", 1) else None for state in states]
        # copies, since a file of tensors would contain all of what a view is a part of
        copies = copy_tensors(values, lambda tensor: tensor.detach().to("cpu", copy=True))
        packets = self._world.gather_bytes(pack({"values": copies}))
        return None if packets is None else [unpack(data)["values"] for data in packets]

    def _merge(self, states: Sequence[MetricState], values_by_rank: list[Any]) -> None:
        for index, state in enumerate(states):
            updated = [values[index] for values in values_by_rank if values[index] is not None]
            if updated:
                device = state.device or self._world.device
                state.replace(map_tensors(partial(Tensor.to, device=device), merge_values(state, updated)))


def build_metrics(task: Task, world: TrainingWorld) -> TaskMetrics:
    """Build the metric objects of a task, on the rank's device.

    Args:
        task: has its model.
        world: the ranks.

    Raises:
        TaskError: `Task.build_metrics` broke its contract.
    """
    metrics = checked_metrics(task)
    for metric in metrics.values():
        metric.to(world.device)
        for owner in owners_of(metric):
            # torchmetrics would reduce states by itself, in `compute` or in `forward`: ranks with different numbers of
            # batches would wait for each other, and nothing would bound what they send
            owner.distributed_available_fn = _never
    return TaskMetrics(metrics, task, world)


def _never() -> bool:
    return False


def _memory(tensor: Tensor) -> tuple[torch.device, int]:
    storage = local_part(tensor).untyped_storage()
    return storage.device, storage.data_ptr()


def _default(state: MetricState) -> Tensor:
    assert state.default is not None
    return state.default


def _is_expandable(shape: list[int], target: list[int]) -> bool:
    return len(shape) <= len(target) and all(
        size in (1, length) for size, length in zip(reversed(shape), reversed(target), strict=False)
    )


def _form(state: MetricState) -> str | None:
    """Describe the shape that a state that isn't elementwise must have on all ranks; None without a value."""
    value = state.value
    if isinstance(value, Tensor) and getattr(state.owner, "_update_count", True):
        return f"rows of shape {list(value.shape[1:])}" if state.reduction == "cat" else f"shape {list(value.shape)}"
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        # metrics concatenate numbers as tensors of one dimension
        return f"tensors of {counted(max(1, value[0].ndim), 'dimension')}"
    return None


def _difference(values: Sequence[object]) -> str:
    """Describe the first rank whose value differs from an earlier rank's; empty if there is none. None is ignored."""
    by_rank = [(rank, value) for rank, value in enumerate(values) if value is not None]
    for rank, value in by_rank:
        first_rank, first = by_rank[0]
        if value != first:
            return f"{first} on rank {first_rank} and {value} on rank {rank}"
    return ""


def _plan_reduction(
    gathered: list[Any], elementwise: Sequence[MetricState], gathered_states: Sequence[MetricState]
) -> dict[str, Any]:
    """Rank zero's decision: the shape of each state, and the number of updates of each object over all ranks."""
    for rank, facts in enumerate(gathered):
        if facts["names"] != gathered[0]["names"]:
            return {"problem": f"expected the same metrics on every rank, but those of ranks 0 and {rank} differ"}
    for index, state in enumerate(gathered_states):
        if difference := _difference([facts["forms"][index] for facts in gathered]):
            return {"problem": f"{state.name} has {difference}"}
    shapes, dtypes = [], []
    for index, state in enumerate(elementwise):
        default = list(_default(state).shape)
        rank_shapes = [facts["shapes"][index] for facts in gathered]
        changed = [None if shape == default else shape for shape in rank_shapes]
        shape = next((shape for shape in changed if shape is not None), default)
        # a rank without samples has the default, which must become the others' shape
        if difference := _difference(changed if _is_expandable(default, shape) else rank_shapes):
            return {"problem": f"{state.name} (reduce={state.reduction}) has the shape {difference}"}
        shapes.append(shape)
        dtype = reduce(torch.promote_types, (getattr(torch, facts["dtypes"][index]) for facts in gathered))
        if dtype.is_complex:
            return {"problem": f"{state.name} is complex, and can't be reduced by {state.reduction}"}
        dtypes.append(str(dtype).removeprefix("torch."))
    updates = [sum(counts) for counts in zip(*(facts["updates"] for facts in gathered), strict=True)]
    return {"problem": "", "shapes": shapes, "dtypes": dtypes, "updates": updates}

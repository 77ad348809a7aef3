"""The states of metric objects, hpctrain's own and those of torchmetrics, and their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.data.micro_batch import iterate_tensors
from hpctrain.tasks.metric import Metric

ELEMENTWISE = ("sum", "min", "max")
"""Reductions that keep the shape of a state."""


@dataclass(frozen=True, slots=True)
class State:
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


def states_of(metric: Any) -> Iterator[State]:
    """The states of a metric object and of those inside, in the same order on every rank."""
    if isinstance(metric, Metric):
        for name, default in metric.defaults.items():
            yield State(metric, name, default, metric.reductions[name])
        return
    for owner in owners_of(metric):
        for name, default in owner._defaults.items():
            is_list = not isinstance(default, Tensor)
            reduction = owner._reductions[name]
            # torchmetrics keeps functions, such as dim_zero_sum, and None for "stack"
            kind = "stack" if reduction is None else getattr(reduction, "__name__", "").removeprefix("dim_zero_")
            known = kind in (*ELEMENTWISE, "mean", "cat", "stack")
            yield State(owner, name, None if is_list else default, kind if known else reduction)


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


def switch_synchronisation_off(metric: Any) -> None:
    """Keep torchmetrics from reducing states by itself, in `compute` or in `forward`."""
    for owner in owners_of(metric):
        owner.distributed_available_fn = _never


def num_updates(metric: Any) -> list[int]:
    """Return the number of updates of each of `owners_of` since its reset."""
    return [int(owner._update_count) for owner in owners_of(metric)]


def set_num_updates(metric: Any, counts: list[int]) -> None:
    """Set results of `num_updates`, added up over ranks: an object that was never updated warns when it computes."""
    for owner, count in zip(owners_of(metric), counts, strict=True):
        owner._update_count = count
        owner._computed = None


def merged(state: State, values: list[Any]) -> Any:
    """Combine the values of a state that isn't elementwise.

    Args:
        state: of this rank.
        values: the values of the ranks that updated the owner, in rank order; on the CPU.
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


def _never() -> bool:
    return False


class GrowingStates:
    """Counts the bytes of states after each batch of an evaluation, without looking at each tensor again."""

    def __init__(self) -> None:
        self._counted: dict[tuple[int, str], tuple[int, int]] = {}

    def reset(self) -> None:
        """Begin an evaluation."""
        self._counted.clear()

    def estimate(self, states: Iterable[State]) -> int:
        """Return the bytes of the states; list entries that were replaced since the last call count as before.

        Args:
            states: that rank zero gets as they are.
        """
        # metrics of a collection share their states
        by_value = {id(state.value): state for state in states}.values()
        return sum(
            self._size(state, state.value) if isinstance(state.value, list) else num_bytes([state.value])
            for state in by_value
        )

    def _size(self, state: State, entries: list[Any]) -> int:
        key = id(state.owner), state.attribute
        length, size = self._counted.get(key, (0, 0))
        if length > len(entries):
            length, size = 0, 0
        size += num_bytes(entries[length:])
        self._counted[key] = len(entries), size
        return size


def exact_bytes(states: Iterable[State]) -> tuple[int, int]:
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

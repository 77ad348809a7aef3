"""The bytes of metric objects' states that rank zero gets as they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hpctrain.data.micro_batch import iterate_tensors
from hpctrain.train.metric_states import State


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

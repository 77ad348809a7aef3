"""A micro-batch, and the tensors inside the containers that collation makes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from hpctrain.data.keyed_random import IntArray
from hpctrain.errors import TaskError

MOST_MICRO_BATCHES = 2**20
"""Of a step; keeps the numbers of micro-batches of different steps apart."""


class MicroBatch(NamedTuple):
    """The input of one forward and backward pass.

    Attributes:
        batch: the collated samples of the dataset, on the CPU.
        num_samples: samples in it; 0 if the rank has none left in a partial step. The batch then holds one stand-in
            sample, with which the rank takes part in the collectives; its loss must not be counted.
        divisor: divides the mean loss before the backward pass (`BatchPlan.divisors`): the accumulation in a full
            step, infinite for a stand-in, so that its gradients are zero.
        is_last: whether this is the step's last micro-batch: synchronise gradients, then update the weights.
        indices: the samples' indices, int64; also for a stand-in.
        on_device: whether the batch is on the rank's device already (`BatchTransfer`).
        weight: of the losses of the batch (`Task.loss_weight`); None: ``num_samples``.
        num_delivered: samples in the batch, if it is weighed.
        rescale: of a step's last micro-batch: the factor by which to rescale the gradients; 0 if no batch of the step
            has a weight.
    """

    batch: Any
    num_samples: int
    divisor: float
    is_last: bool
    indices: IntArray
    on_device: bool = False
    weight: float | None = None
    num_delivered: int = 0
    rescale: float = 1.0


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Replace every tensor of a batch.

    Descends into mappings, tuples (named ones too), lists and dataclasses, which are copied without a call of
    `__init__` and `__post_init__`; anything else is returned unchanged.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return _rebuilt(batch, {key: map_tensors(function, value) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_tensors(function, value) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        # without __init__: a batch is copied several times on its way, and __post_init__ may change its tensors
        mapped = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(mapped, field.name, map_tensors(function, getattr(batch, field.name)))
        return mapped
    return batch


def iterate_tensors(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch, in the order in which its containers hold them."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from iterate_tensors(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from iterate_tensors(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from iterate_tensors(getattr(batch, field.name))


def shapes_of(batch: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of a batch's tensors, in the order of `iterate_tensors`.

    Raises:
        TaskError: it has no tensors.
    """
    shapes = tuple(tuple(tensor.shape) for tensor in iterate_tensors(batch))
    if not shapes:
        raise TaskError(
            f"in a pipeline, batches must hold tensors, and this one is a {type(batch).__name__} without any: make "
            "them in the dataset, or in collate_fn"
        )
    return shapes


def _rebuilt(original: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return values
    try:
        # OrderedDict and Hugging Face's BatchEncoding, for example, are made from a dict
        return type(original)(values)  # type: ignore[call-arg]
    except TypeError:
        return values

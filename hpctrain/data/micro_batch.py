"""A micro-batch, and the tensors inside the containers that collation makes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
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
        weight: what the losses of the batch count for (`Task.loss_weight`); None: ``num_samples``.
        num_delivered: samples that the batch holds, if it is weighed.
        rescale: of the last micro-batch of a step: the factor of the step's gradients; 0 if nothing in the step has a
            weight.
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


def samples_in(batch: Any, num_asked: int, num_read: int) -> int:
    """How many samples a collated batch holds.

    If anything in it has the length ``num_read``, it holds those. Otherwise some were left out, or replaced, and the
    length of what comes first counts, unless that is more than was asked for: points of clouds, or nodes of graphs.

    Args:
        batch: tensors, arrays, or lists with an element for each sample, in containers; others have no length.
        num_asked: samples that were asked for.
        num_read: those of them that could be read.
    """
    if batch is None:
        return 0
    lengths = list(_lengths(batch))
    return num_read if not lengths or num_read in lengths or lengths[0] > num_asked else lengths[0]


def _lengths(batch: Any, *, is_field: bool = False) -> Iterator[int]:
    """The lengths of a batch's tensors, arrays and lists, but for a list of the fields, unless it is empty."""
    fields: Iterable[Any] = ()
    if isinstance(batch, (Tensor, np.ndarray)):
        if batch.ndim:
            yield len(batch)
    elif isinstance(batch, Mapping):
        fields = batch.values()
    elif isinstance(batch, (tuple, list)):
        if is_field or not batch:
            yield len(batch)
        fields = () if is_field and _is_of_samples(batch) else batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    for field in fields:
        yield from _lengths(field, is_field=True)


def _is_of_samples(batch: Sequence[Any]) -> bool:
    """Whether a list has an element for each sample, whose own lengths say nothing, and not a tensor for each field."""
    lengths = {len(element) for element in batch if isinstance(element, Tensor) and element.dim()}
    return len(lengths) > 1 or all(isinstance(element, Mapping) for element in batch)


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

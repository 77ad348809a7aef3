"""Tensors inside the containers that collation makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """The same batch with every tensor replaced.

    Goes into mappings, tuples (named ones too), lists and dataclasses; anything else is returned as it is.
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
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch) if field.init}
        return dataclasses.replace(batch, **{name: map_tensors(function, value) for name, value in fields.items()})
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


def _rebuilt(original: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return values
    try:
        return type(original)(values)  # type: ignore[call-arg]  # what mappings such as OrderedDict and BatchEncoding take
    except TypeError:
        return values

"""Tensors in a checkpoint, of which several ranks may have written parts: read as a whole, or any part of them."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hpctrain.errors import CheckpointError
from hpctrain.files import read_bytes
from hpctrain.phrases import listed
from hpctrain.run.checkpoint_manifest import INDEX, ChunkPlace, IndexedTensor, Region, decode_index

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Of mmap(2); Python has the name from 3.13 on."""


StoredPart: TypeAlias = tuple[Region, Callable[[], Tensor]]
"""A box of a tensor, and a function that returns its elements."""


class StoredTensor:
    """A tensor in a checkpoint.

    Args:
        name: for messages.
        shape: of the whole tensor.
        dtype: of its elements.
        parts: which together are the tensor.

    Attributes:
        shape: of the whole tensor.
        dtype: of its elements.
    """

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, parts: Sequence[StoredPart]) -> None:
        self._name = name
        self._parts = parts
        self.shape = shape
        self.dtype = dtype

    @classmethod
    def of(cls, tensor: Tensor) -> StoredTensor:
        """A tensor in memory, or mapped from a file, as one that was stored whole."""
        shape = tuple(tensor.shape)
        return cls("tensor", shape, tensor.dtype, [(Region.whole(shape), lambda: tensor)])

    def read(self, region: Region | None = None) -> Tensor:
        """Return a region of the tensor, on the CPU.

        Args:
            region: of the tensor; None for all of it.

        Returns:
            A view of the mapped file if one chunk has all of the region, otherwise a new tensor.

        Raises:
            CheckpointError: the chunks don't have all of it.
        """
        region = region or Region.whole(self.shape)
        for box, elements in self._parts:
            if box.intersect(region) == region:
                return elements()[region.relative_to(box).slices()]
        target = torch.empty(region.sizes, dtype=self.dtype)
        self.copy_into(target, region)
        return target

    @torch.no_grad()
    def copy_into(self, target: Tensor, region: Region) -> None:
        """Copy a region of the tensor, chunk by chunk.

        Args:
            target: of the region's sizes, on any device.
            region: of the tensor.

        Raises:
            CheckpointError: the chunks don't have all of it.
        """
        assert tuple(target.shape) == region.sizes, f"{tuple(target.shape)} for {region}"
        copied = 0
        for box, elements in self._parts:
            if (shared := box.intersect(region)) is not None:
                source = elements()[shared.relative_to(box).slices()]
                target[shared.relative_to(region).slices()].copy_(source)
                copied += shared.numel
        if copied != region.numel:
            raise CheckpointError(
                f"the checkpoint has {copied:,} of {region.numel:,} elements of {self._name} in its files"
            )


def open_index(path: Path, index: Mapping[str, IndexedTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint; its files are mapped when they are first read.

    Args:
        path: directory of the checkpoint.
        index: of the checkpoint.

    Raises:
        CheckpointError: it has elements of an unknown type.
    """
    names = {tensor.dtype for tensor in index.values()}
    # not getattr, for which torch imports modules
    dtypes = {name: dtype for name in names if isinstance(dtype := vars(torch).get(name), torch.dtype)}
    if unknown := sorted(names - dtypes.keys()):
        raise CheckpointError(f"{path} has elements of types that this torch doesn't know: {listed(unknown)}")
    mapped = cache(partial(_mapped, path))
    # tied weights have one place, and are one object here
    stored = {}
    for name, tensor in reversed([*index.items()]):
        dtype = dtypes[tensor.dtype]
        parts = [(place.region, partial(_elements, path, mapped, place, dtype)) for place in tensor.chunks]
        stored[tensor] = StoredTensor(name, tensor.shape, dtype, parts)
    return {name: stored[tensor] for name, tensor in index.items()}


def _elements(path: Path, mapped: Callable[[str], mmap.mmap], place: ChunkPlace, dtype: torch.dtype) -> Tensor:
    """The elements of a chunk, in the file's mapping."""
    memory = mapped(place.file)
    if place.region.numel * dtype.itemsize + place.data_offset > len(memory):
        raise CheckpointError(f"{path / place.file} is shorter than the index says")
    flat = torch.frombuffer(memory, dtype=dtype, count=place.region.numel, offset=place.data_offset)
    return flat.view(place.region.sizes)


def _mapped(path: Path, name: str) -> mmap.mmap:
    if "/" in name or name in ("", ".", ".."):
        raise CheckpointError(f"{name!r} isn't a file of the checkpoint {path}")
    try:
        with (path / name).open("rb") as file:
            # private, since torch warns of memory that can't be written, and nothing may reach the file; without
            # reserve, since Linux otherwise refuses to map a file that is larger than the machine's memory
            return mmap.mmap(
                file.fileno(), 0, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / name} can't be read: {error}") from error


LARGEST_INDEX_BYTES = 2**30
"""Of the index: it has a line per part that a rank wrote of a tensor."""
MODEL_PREFIX = "model."
"""Begins the names of the model's tensors."""


def read_parts(path: Path, content: Any) -> dict[str, Any]:
    """Return the fields of a `Snapshot`, with a `StoredTensor` for each tensor of which ranks wrote parts.

    Args:
        path: directory of the checkpoint.
        content: of its `state.pt`.

    Raises:
        CheckpointError: its files don't fit together, or can't be read.
    """
    try:
        tensors = open_index(path, decode_index(read_bytes(path / INDEX, at_most=LARGEST_INDEX_BYTES)))
    except OSError as error:
        raise CheckpointError(f"{path / INDEX} can't be read: {error.strerror}") from error

    def without_marker(value: Any) -> Any:
        if not isinstance(value, Mapping) or value.keys() != {KEY}:
            return value
        if (name := value[KEY]) not in tensors:
            raise CheckpointError(f"{path / INDEX} lacks the tensor {name}, to which state.pt refers")
        return tensors[name]

    model: dict[str, Any] = {
        name.removeprefix(MODEL_PREFIX): tensor for name, tensor in tensors.items() if name.startswith(MODEL_PREFIX)
    }
    return {
        "model": model | content["model"],
        "optimizer": _replaced(content["optimizer"], without_marker),
        "state": _replaced(content["state"], without_marker),
    }


def whole_tensors(value: Any) -> Any:
    """Return a tree of saved values in which each `StoredTensor` is read as a whole."""
    return _replaced(value, lambda leaf: leaf.read() if isinstance(leaf, StoredTensor) else leaf)


def _replaced(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a tree with what a function returns for each value; where that is the value itself, look inside it."""
    if (new := replace(value)) is not value:
        return new
    if isinstance(value, Mapping):
        return {key: _replaced(item, replace) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_replaced(item, replace) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


KEY = "stored tensor"
"""The only key of a marker, which is a dict so that plain torch can load it; its value is the tensor's name."""


def marker(name: str) -> dict[str, str]:
    """Return what stands for the tensor of this name in the checkpoint's index."""
    return {KEY: name}

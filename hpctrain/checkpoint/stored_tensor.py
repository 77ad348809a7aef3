"""Tensors in a checkpoint, of which several ranks may have written parts: read as a whole, or any part of them."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpctrain.errors import CheckpointError
from hpctrain.files import read_bytes
from hpctrain.phrases import listed
from hpctrain.run.checkpoint_manifest import INDEX, ChunkPlace, IndexedTensor, Region, decode_index

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Of mmap(2); Python has the name from 3.13 on."""
DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class _Files:
    """The files of a checkpoint, mapped when they are first needed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map = cache(self._mapped)

    def view(self, place: ChunkPlace, dtype: torch.dtype) -> Tensor:
        """The elements of a chunk, in the file's mapping."""
        if place.region.numel * dtype.itemsize + place.data_offset > len(memory := self._map(place.file)):
            raise CheckpointError(f"{self._path / place.file} is shorter than the index says")
        flat = torch.frombuffer(memory, dtype=dtype, count=place.region.numel, offset=place.data_offset)
        return flat.view(place.region.sizes)

    def _mapped(self, name: str) -> mmap.mmap:
        if "/" in name or name in ("", ".", ".."):
            raise CheckpointError(f"{name!r} isn't a file of the checkpoint {self._path}")
        try:
            with (self._path / name).open("rb") as file:
                # private, since torch warns of memory that can't be written, and nothing may reach the file; without
                # reserve, since Linux otherwise refuses to map a file that is larger than the machine's memory
                return mmap.mmap(
                    file.fileno(), 0, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self._path / name} can't be read: {error}") from error


class StoredTensor:
    """A tensor in a checkpoint.

    Args:
        name: for messages.
        indexed: its shape, type and chunks.
        files: of the checkpoint.

    Attributes:
        shape: of the whole tensor.
        dtype: of its elements.
    """

    def __init__(self, name: str, indexed: IndexedTensor, files: _Files) -> None:
        self._name = name
        self._indexed = indexed
        self._files = files
        self._whole: Tensor | None = None
        self.shape = indexed.shape
        self.dtype = DTYPES[indexed.dtype]

    @classmethod
    def of(cls, tensor: Tensor) -> StoredTensor:
        """A tensor in memory, or mapped from a file, as one that was stored whole."""
        made = object.__new__(cls)
        made._name = "tensor"
        made._whole = tensor
        made.shape = tuple(tensor.shape)
        made.dtype = tensor.dtype
        return made

    def files(self, region: Region | None = None) -> set[str]:
        """Return the names of the files that have elements of a region, of the whole tensor without one."""
        if self._whole is not None:
            return set()
        wanted = region or Region.whole(self.shape)
        return {place.file for place in self._indexed.chunks if place.region.intersect(wanted)}

    def read(self, region: Region | None = None) -> Tensor:
        """Return a region of the tensor, on the CPU.

        Args:
            region: of the tensor; None for all of it.

        Returns:
            A view of the mapped file if one chunk has all of the region, otherwise a new tensor.

        Raises:
            CheckpointError: the chunks don't have all of it.
        """
        wanted = region or Region.whole(self.shape)
        for box, elements in self._parts():
            if box.intersect(wanted) == wanted:
                return elements()[wanted.relative_to(box).slices()]
        made = torch.empty(wanted.sizes, dtype=self.dtype)
        self.copy_into(made, wanted)
        return made

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
        for box, elements in self._parts():
            if (shared := box.intersect(region)) is not None:
                source = elements()[shared.relative_to(box).slices()]
                target[shared.relative_to(region).slices()].copy_(source)
                copied += shared.numel
        if copied != region.numel:
            raise CheckpointError(
                f"the checkpoint has {copied:,} of {region.numel:,} elements of {self._name} in its files"
            )

    def _parts(self) -> Iterator[tuple[Region, Callable[[], Tensor]]]:
        """The regions of the parts, and functions that return their elements."""
        whole = self._whole
        if whole is not None:
            yield Region.whole(self.shape), lambda: whole
            return
        for place in self._indexed.chunks:
            yield place.region, partial(self._files.view, place, self.dtype)


def open_index(path: Path, index: Mapping[str, IndexedTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint; its files are mapped when they are first read.

    Args:
        path: directory of the checkpoint.
        index: of the checkpoint.

    Raises:
        CheckpointError: it has elements of an unknown type.
    """
    files = _Files(path)
    if unknown := sorted({one.dtype for one in index.values()} - DTYPES.keys()):
        raise CheckpointError(f"{path} has elements of types that this torch doesn't know: {listed(unknown)}")
    # tied weights have one place, and are one object here
    stored = {one: StoredTensor(name, one, files) for name, one in reversed([*index.items()])}
    return {name: stored[one] for name, one in index.items()}


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
    find = partial(_find, tensors, path)
    model: dict[str, Any] = {
        name.removeprefix(MODEL_PREFIX): tensor for name, tensor in tensors.items() if name.startswith(MODEL_PREFIX)
    }
    return {
        "model": model | content["model"],
        "optimizer": without_markers(content["optimizer"], find),
        "state": without_markers(content["state"], find),
    }


def whole_tensors(value: Any) -> Any:
    """Return a tree of saved values in which each `StoredTensor` is read as a whole."""
    if isinstance(value, StoredTensor):
        return value.read()
    if isinstance(value, Mapping):
        return {key: whole_tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        found = [whole_tensors(item) for item in value]
        return tuple(found) if isinstance(value, tuple) else found
    return value


def _find(tensors: dict[str, StoredTensor], path: Path, name: str) -> StoredTensor:
    if name not in tensors:
        raise CheckpointError(f"{path / INDEX} lacks the tensor {name}, to which state.pt refers")
    return tensors[name]


KEY = "stored tensor"
"""The only key of a marker, which is a dict so that plain torch can load it; its value is the tensor's name."""


def marker(name: str) -> dict[str, str]:
    """Return what stands for the tensor of this name in the checkpoint's index."""
    return {KEY: name}


def without_markers(value: Any, find: Callable[[str], Any]) -> Any:
    """Return a tree in which each marker is replaced by what ``find`` returns for its name."""
    if isinstance(value, Mapping):
        if value.keys() == {KEY}:
            return find(value[KEY])
        return {key: without_markers(item, find) for key, item in value.items()}
    if isinstance(value, list | tuple):
        found = [without_markers(item, find) for item in value]
        return tuple(found) if isinstance(value, tuple) else found
    return value

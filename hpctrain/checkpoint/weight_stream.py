"""Weights that don't fit into memory together, read one after the other and written into files of other formats.

Why it is like this: docs/adr/0035-what-stays-ours.md.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, TensorSpec, serialize
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hpctrain.checkpoint.host_memory import element_bytes
from hpctrain.checkpoint.stored_tensor import StoredTensor
from hpctrain.errors import CheckpointError
from hpctrain.files import errors_naming, fsync_directory, write_atomic
from hpctrain.run.checkpoint_manifest import Region

PIECE_BYTES = 16 << 20
"""Bytes that are read at a time; more, if one row of the tensor is larger."""
_MADV_PAGEOUT = 21
"""Give pages back to the kernel without losing what is in them (madvise(2), Linux 5.4)."""
_madvise = ctypes.CDLL(None).madvise


class WeightStream:
    """The elements of a stored tensor, perhaps in another type, in row-major order.

    Attributes:
        shape: of the tensor.
        dtype: in which its elements are given.
        overflows: whether a finite element that was given became infinite in that type.

    Args:
        stored: the tensor.
        dtype: for floating-point elements; others keep their type. None keeps that as well.
    """

    def __init__(self, stored: StoredTensor, dtype: torch.dtype | None = None) -> None:
        # the elements' bytes are given as they are in memory
        assert sys.byteorder == "little"
        self._stored = stored
        self.shape = tuple(stored.shape)
        self.dtype = dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype
        self.overflows = False

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def pieces(self) -> Iterator[memoryview]:
        """Yield the elements' bytes; a piece is valid until the next one is taken.

        Raises:
            CheckpointError: a part of the tensor isn't in the checkpoint.
        """
        for region in self._regions():
            source = self._stored.read(region)
            elements = source.to(self.dtype)
            if elements.dtype != source.dtype and torch.finfo(elements.dtype).max < torch.finfo(source.dtype).max:
                infinite = elements.isinf()
                self.overflows |= bool(infinite.any()) and bool((infinite & source.isfinite()).any())
            yield element_bytes(elements).numpy().data
            _let_go(source)

    def _regions(self) -> Iterator[Region]:
        """Yield boxes that follow each other in row-major order."""
        if not self.nbytes:
            return
        # the first axis along which a box can be cut without changing the order of its elements
        axis = next((axis for axis, size in enumerate(self.shape) if size > 1), None)
        if axis is None:
            yield Region.whole(self.shape)
            return
        size = self.shape[axis]
        itemsize = max(self._stored.dtype.itemsize, self.dtype.itemsize)
        rows = max(1, PIECE_BYTES // (math.prod(self.shape[axis + 1 :]) * itemsize))
        for first in range(0, size, rows):
            offsets = tuple(first if dimension == axis else 0 for dimension in range(len(self.shape)))
            sizes = (*self.shape[:axis], min(rows, size - first), *self.shape[axis + 1 :])
            yield Region(offsets, sizes)


def _let_go(tensor: Tensor) -> None:
    """Unmap the pages of a file that only this tensor uses: they would count as this process's memory until its end."""
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if tensor.is_contiguous() and begin < end:
        # an older kernel refuses: the pages then stay until others need the memory
        _madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_PAGEOUT)


LINE = "\n"


def write_torch_file(
    path: Path, weights: Mapping[str, WeightStream], versions: object, on_write: Callable[[int], None]
) -> None:
    """Write a new file, and make it durable; `torch.load(path, weights_only=True)` returns the tensors by name.

    Names with the same `WeightStream` share their tensor. As in hpctrain's own files, the CRC-32 fields of the zip
    format don't match, which torch doesn't read.

    Args:
        path: must not exist.
        weights: by name.
        versions: the modules' versions, as `Module.state_dict` returns them in `_metadata`; None without.
        on_write: called with the number of bytes after each write.

    Raises:
        OSError: the file can't be written; a part of it may be left.
    """
    state: OrderedDict[str, Tensor] = OrderedDict()
    tensors: dict[WeightStream, Tensor] = {}
    with FakeTensorMode():
        for name, weight in weights.items():
            if weight not in tensors:
                tensors[weight] = torch.empty(weight.shape, dtype=weight.dtype)
            state[name] = tensors[weight]
    if versions is not None:
        state._metadata = versions  # type: ignore[attr-defined]
    # a file with holes in the place of the elements
    try:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(state, path)
    except RuntimeError as error:
        raise OSError(f"torch: {str(error).partition(LINE)[0]}") from error
    with FakeTensorMode():
        places = torch.load(path, weights_only=True)
    with errors_naming(path), path.open("r+b") as file:
        for weight, name in {weight: name for name, weight in weights.items()}.items():
            file.seek(places[name].untyped_storage()._checkpoint_offset)
            for piece in weight.pieces():
                file.write(piece)
                on_write(len(piece))
        file.flush()
        os.fsync(file.fileno())


_LENGTH_BYTES = 8
"""Size of the header's length, which precedes the header. The header is padded to a multiple of it."""


def write_safetensors(path: Path, weights: Mapping[str, WeightStream], on_write: Callable[[int], None]) -> None:
    """Write a new file, and make it durable. For the same tensors it has the same bytes as the package's `save_file`.

    Only the header is the package's: it has no stable function that writes one tensor after another, and all of a
    checkpoint, converted to another type, may not fit into memory. A mapped scratch file would take twice the space.

    Args:
        path: must not exist.
        weights: by name.
        on_write: called with the number of bytes after each write.

    Raises:
        CheckpointError: the format lacks the type of a tensor.
        OSError: the file can't be written; a part of it may be left.
    """
    header, names = _header(weights)
    with errors_naming(path), path.open("xb") as file:
        file.write(header)
        for name in names:
            for piece in weights[name].pieces():
                file.write(piece)
                on_write(len(piece))
        file.flush()
        os.fsync(file.fileno())


def _header(weights: Mapping[str, WeightStream]) -> tuple[bytes, list[str]]:
    """Return the bytes before the elements, and the names in the order of their elements."""
    empty = {}
    for name, weight in weights.items():
        kind = str(weight.dtype).removeprefix("torch.")
        try:
            empty[name] = TensorSpec(dtype=kind, shape=(0, *weight.shape), data_ptr=0, data_len=0)
        except SafetensorError as error:
            problem = f"{name} is {kind}, which safetensors files can't hold; export to a .pt file instead"
            raise CheckpointError(problem) from error
    entries = json.loads(serialize(empty, metadata={"format": "pt"})[_LENGTH_BYTES:])
    names = [name for name in entries if name in weights]
    end = 0
    for name in names:
        begin, end = end, end + weights[name].nbytes
        entries[name]["shape"].pop(0)
        entries[name]["data_offsets"] = [begin, end]
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, names


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Names of the files; others in such a folder, such as config.json, are the user's."""


def write_folder(
    path: Path, weights: Mapping[str, WeightStream], max_bytes: int, on_write: Callable[[int], None]
) -> None:
    """Fill an empty folder, and make its files durable.

    Weights that fit into one file are `model.safetensors`. Others are files that are numbered from 1, with an index
    that has the sum of the tensors' bytes (`metadata.total_size`) and the file of each tensor (`weight_map`).

    Args:
        path: of the folder.
        weights: by name; the files have them in this order.
        max_bytes: bytes of a file's tensors; a larger tensor has a file of its own.
        on_write: called with the number of bytes after each write.

    Raises:
        CheckpointError: the format lacks the type of a tensor.
        OSError: a file can't be written; a part of it may be left.
    """
    groups = list(_groups(weights, max_bytes))
    if len(groups) == 1:
        write_safetensors(path / SINGLE, weights, on_write)
    else:
        names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
        for name, group in zip(names, groups, strict=True):
            write_safetensors(path / name, group, on_write)
        index = {
            "metadata": {"total_size": sum(weight.nbytes for weight in weights.values())},
            "weight_map": {tensor: file for file, group in zip(names, groups, strict=True) for tensor in group},
        }
        write_atomic(path / INDEX, json.dumps(index, indent=2, ensure_ascii=False) + "\n")
    fsync_directory(path)


def publish_folder(folder: Path, path: Path) -> None:
    """Give a folder its name, or replace the weights in an existing one, and leave its other files as they are.

    Args:
        folder: next to ``path``, filled by `write_folder`.
        path: a folder, or nothing.
    """
    if path.is_dir() and any(path.iterdir()):
        # the index first and last: without it, no reader takes files of two models for one
        for file in sorted(weight_files(path), key=_is_no_index):
            file.unlink()
        for file in sorted(folder.iterdir(), key=_is_no_index, reverse=True):
            file.replace(path / file.name)
        folder.rmdir()
        fsync_directory(path)
    else:
        folder.replace(path)
    fsync_directory(path.parent)


def weight_files(path: Path) -> list[Path]:
    """Return the files in a folder that hold weights, and their index."""
    return [file for file in path.iterdir() if WEIGHTS.fullmatch(file.name)]


def _is_no_index(file: Path) -> bool:
    return file.name != INDEX


def _groups(weights: Mapping[str, WeightStream], max_bytes: int) -> Iterator[dict[str, WeightStream]]:
    group: dict[str, WeightStream] = {}
    size = 0
    for name, weight in weights.items():
        if group and size + weight.nbytes > max_bytes:
            yield group
            group, size = {}, 0
        group[name] = weight
        size += weight.nbytes
    yield group

"""The files of a rank in a sharded checkpoint, and their description for torch.distributed.checkpoint (DCP).

Other programs can read the files by DCP. hpctrain never reads the description, a pickle of DCP's `Metadata` as
`FileSystemWriter.finish` of torch 2.13 writes it. DCP's own writer has no checksums, unpickles what others wrote,
doesn't publish in one rename, and took twice as long.
"""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hpctrain.checkpoint.host_memory import element_bytes
from hpctrain.checkpoint.write import UNCOPIED_FROM_BYTES, ChecksummedFile, without_crc32
from hpctrain.run.checkpoint_manifest import ChunkPlace, IndexedTensor, Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The part of a tensor that one rank writes.

    Attributes:
        name: of the tensor in the checkpoint.
        shape: of the whole tensor.
        region: of the part.
        tensor: the part, on the CPU, of any strides.
    """

    name: str
    shape: tuple[int, ...]
    region: Region
    tensor: Tensor


ALIGNMENT = 64
"""Each tensor begins at a multiple of so many bytes, as inside torch's own files."""


class WrittenFile(NamedTuple):
    """A file that a rank has written, in plain values, for the message to rank zero.

    Attributes:
        name: of the file.
        bytes: its size.
        checksum: of its bytes.
        places: name of the tensor and `ChunkPlace.as_list`, for each chunk with elements.
    """

    name: str
    bytes: int
    checksum: str
    places: list[tuple[str, list[Any]]]


class _Recorder:
    """Keeps what torch.save writes before and after the elements of a tensor.

    Args:
        elements: the tensor, whose memory torch.save passes on as it is.
    """

    def __init__(self, elements: Tensor) -> None:
        self.before = bytearray()
        self.after = bytearray()
        self.is_after = False
        self._address = elements.data_ptr()

    def write(self, data: Any) -> int:
        view = np.frombuffer(data, np.uint8)
        if view.ctypes.data == self._address and len(view):
            self.is_after = True
        else:
            (self.after if self.is_after else self.before).extend(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing; torch.save calls it."""


@lru_cache(4096)
def _envelope(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return the bytes that torch.save writes before and after the elements of any tensor of a dtype and shape."""
    # torch.save takes a fraction of a millisecond for each tensor, and a model has many of few shapes
    tensor = torch.empty(shape, dtype=dtype)
    recorder = _Recorder(tensor)
    torch.save(tensor, cast(IO[bytes], recorder))
    assert recorder.is_after, "torch.save has written no elements"
    return bytes(recorder.before), bytes(recorder.after)


def write_chunks(path: Path, chunks: Sequence[Chunk]) -> WrittenFile:
    """Write chunks into a new file, one after the other, and make it durable.

    Raises:
        OSError: the file can't be written.
    """
    with ChecksummedFile(path) as file, without_crc32():
        places = [(chunk.name, _write(file, path.name, chunk).as_list()) for chunk in chunks if chunk.region.numel]
    return WrittenFile(path.name, file.bytes, file.checksum, places)


def _write(file: ChecksummedFile, name: str, chunk: Chunk) -> ChunkPlace:
    assert tuple(chunk.tensor.shape) == chunk.region.sizes, f"{tuple(chunk.tensor.shape)} for {chunk.region}"
    tensor = chunk.tensor
    before, after = _envelope(tensor.dtype, chunk.region.sizes)
    # where the elements begin at a page, they are written without a copy
    align_to, shift = (mmap.PAGESIZE, len(before)) if tensor.nbytes >= UNCOPIED_FROM_BYTES else (ALIGNMENT, 0)
    file.write(bytes(-(file.bytes + shift) % align_to))
    offset = file.bytes
    file.write(before)
    data_offset = file.bytes
    file.write(element_bytes(tensor).numpy().data)
    file.write(after)
    return ChunkPlace(chunk.region, name, offset, file.bytes - offset, data_offset)


def encode_metadata(tensors: Mapping[str, IndexedTensor], paths: Mapping[str, tuple[str, ...]]) -> bytes:
    """Return the bytes of the description.

    Args:
        tensors: by name.
        paths: where each tensor is in nested dicts: names have dots in them, from which DCP couldn't derive it.
    """
    described: dict[str, STORAGE_TYPES] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for name, tensor in tensors.items():
        regions = [place.region for place in tensor.chunks]
        chunks = [ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.sizes)) for region in regions]
        properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
        described[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for number, place in enumerate(tensor.chunks):
            index = MetadataIndex(name, place.region.offsets, number)
            stored[index] = _StorageInfo(place.file, place.offset, place.bytes)
    metadata = Metadata(
        state_dict_metadata=described, planner_data=dict(paths), storage_data=stored, version=CURRENT_DCP_VERSION
    )
    return pickle.dumps(metadata)

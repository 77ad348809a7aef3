"""The file of a rank in a sharded checkpoint: tensors as torch.distributed.checkpoint (DCP) stores them."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, cast

import torch

from hpctrain.checkpoint.checksummed_file import UNCOPIED_FROM_BYTES, ChecksummedFile
from hpctrain.checkpoint.sharded.chunk import Chunk
from hpctrain.checkpoint.write import without_crc32
from hpctrain.run.checkpoint_manifest import ChunkPlace

ALIGNMENT = 64
"""Each tensor begins at a multiple of so many bytes, as inside torch's own files."""
_LOCAL_HEADER = b"PK\x03\x04"
_ELEMENTS = b"/data/0"


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that a rank has written.

    Attributes:
        name: of the file.
        bytes: its size.
        checksum: of its bytes.
        places: name of the tensor and place, for each chunk with elements.
    """

    name: str
    bytes: int
    checksum: str
    places: tuple[tuple[str, ChunkPlace], ...]

    def to_message(self) -> dict[str, Any]:
        """The description for another rank, in plain values."""
        places = [[name, place.as_list()] for name, place in self.places]
        return {"name": self.name, "bytes": self.bytes, "checksum": self.checksum, "places": places}

    @classmethod
    def from_message(cls, message: Any) -> WrittenFile:
        """Read a result of `to_message`."""
        places = tuple((str(name), ChunkPlace.from_list(place)) for name, place in message["places"])
        return cls(str(message["name"]), int(message["bytes"]), str(message["checksum"]), places)


@dataclass(frozen=True, slots=True)
class _Envelope:
    """What torch.save writes around the elements of a tensor; the same for all tensors of one dtype and shape.

    Attributes:
        before: bytes before the elements.
        after: bytes after them.
    """

    before: bytes
    after: bytes


class _Recorder:
    """Keeps what torch.save writes, except for the elements of the tensor."""

    def __init__(self) -> None:
        self._pieces = [bytearray(), bytearray()]
        self._bytes = 0
        self._header = 0
        self._sizes = (0, 0)
        self._begin = -1

    @property
    def envelope(self) -> _Envelope:
        assert self._begin >= 0, "torch.save has written no elements"
        return _Envelope(*map(bytes, self._pieces))

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        if len(rest) == 30 and bytes(rest[:4]) == _LOCAL_HEADER:
            # APPNOTE.TXT of the zip format, 4.3.7: the last fields are the lengths of the name and of an extra field
            self._header = self._bytes
            self._sizes = struct.unpack("<HH", rest[26:30])
        elif len(rest) == self._sizes[0] and bytes(rest[-len(_ELEMENTS) :]) == _ELEMENTS:
            self._begin = self._header + 30 + sum(self._sizes)
        if self._bytes != self._begin:
            self._pieces[0 <= self._begin < self._bytes] += rest
        self._bytes += len(rest)
        return len(rest)

    def flush(self) -> None:
        """Do nothing; torch.save calls it."""


@lru_cache(4096)
def _envelope(dtype: torch.dtype, shape: tuple[int, ...]) -> _Envelope:
    # torch.save takes a fraction of a millisecond for each tensor, and a model has many of few shapes
    recorder = _Recorder()
    torch.save(torch.empty(shape, dtype=dtype), cast(IO[bytes], recorder))
    return recorder.envelope


def write_chunks(path: Path, chunks: Sequence[Chunk]) -> WrittenFile:
    """Write chunks into a new file, one after the other, and make it durable.

    Raises:
        OSError: the file can't be written.
    """
    file = ChecksummedFile(path)
    try:
        with without_crc32():
            places = [(chunk.name, _write(file, path.name, chunk)) for chunk in chunks if chunk.region.numel]
    finally:
        file.close()
    return WrittenFile(path.name, file.bytes, file.checksum, tuple(places))


def _write(file: ChecksummedFile, name: str, chunk: Chunk) -> ChunkPlace:
    assert tuple(chunk.tensor.shape) == chunk.region.sizes, f"{tuple(chunk.tensor.shape)} for {chunk.region}"
    tensor = chunk.tensor.detach().resolve_conj().resolve_neg().contiguous()
    envelope = _envelope(tensor.dtype, tuple(tensor.shape))
    # where the elements begin at a page, they are written without a copy
    align_to, before = (mmap.PAGESIZE, len(envelope.before)) if tensor.nbytes >= UNCOPIED_FROM_BYTES else (ALIGNMENT, 0)
    file.write(bytes(-(file.bytes + before) % align_to))
    offset = file.bytes
    file.write(envelope.before)
    data_offset = file.bytes
    file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
    file.write(envelope.after)
    return ChunkPlace(chunk.region, name, offset, file.bytes - offset, data_offset)

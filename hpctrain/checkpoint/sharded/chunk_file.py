"""The file of a rank in a sharded checkpoint: tensors as torch.distributed.checkpoint (DCP) stores them."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from hpctrain.checkpoint.checksummed_file import UNCOPIED_FROM_BYTES, ChecksummedFile
from hpctrain.checkpoint.sharded.chunk import Chunk
from hpctrain.checkpoint.write import without_crc32
from hpctrain.run.tensor_index import ChunkPlace

ALIGNMENT = 64
"""Each tensor begins at a multiple of so many bytes, as inside torch's own files."""
HEADER_BYTES = 704
"""What torch 2.13 writes before the elements of a tensor; another number costs a copy of the first large one."""
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


class _Recorder:
    """Passes on what torch.save writes, and notes where the elements of the tensor begin."""

    def __init__(self, file: ChecksummedFile) -> None:
        self._file = file
        self._header = 0
        self._sizes = (0, 0)
        self.begin = 0

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        if len(rest) == 30 and bytes(rest[:4]) == _LOCAL_HEADER:
            # APPNOTE.TXT of the zip format, 4.3.7: the last fields are the lengths of the name and of an extra field
            self._header = self._file.bytes
            self._sizes = struct.unpack("<HH", rest[26:30])
        elif len(rest) == self._sizes[0] and bytes(rest[-len(_ELEMENTS) :]) == _ELEMENTS:
            self.begin = self._header + 30 + sum(self._sizes)
        return self._file.write(rest)

    def flush(self) -> None:
        """Do nothing; torch.save calls it."""


def write_chunks(path: Path, chunks: Sequence[Chunk]) -> WrittenFile:
    """Write chunks into a new file, one after the other, and make it durable.

    Raises:
        OSError: the file can't be written.
    """
    file = ChecksummedFile(path)
    places: list[tuple[str, ChunkPlace]] = []
    header = HEADER_BYTES
    try:
        with without_crc32():
            for chunk in chunks:
                if chunk.region.numel:
                    place = _write(file, path.name, chunk, header)
                    header = place.data_offset - place.offset
                    places.append((chunk.name, place))
    finally:
        file.close()
    return WrittenFile(path.name, file.bytes, file.checksum, tuple(places))


def _write(file: ChecksummedFile, name: str, chunk: Chunk, header: int) -> ChunkPlace:
    """Write a chunk, whose elements are expected to begin after a header of so many bytes."""
    assert tuple(chunk.tensor.shape) == chunk.region.sizes, f"{tuple(chunk.tensor.shape)} for {chunk.region}"
    # where the elements begin at a page, they are written without a copy
    align_to, before = (mmap.PAGESIZE, header) if chunk.tensor.nbytes >= UNCOPIED_FROM_BYTES else (ALIGNMENT, 0)
    file.write(bytes(-(file.bytes + before) % align_to))
    offset, recorder = file.bytes, _Recorder(file)
    tensor = chunk.tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # torch.save writes the whole storage that a view belongs to
    torch.save(tensor, cast(IO[bytes], recorder))
    assert recorder.begin, "torch.save has written no elements"
    return ChunkPlace(chunk.region, name, offset, file.bytes - offset, recorder.begin)

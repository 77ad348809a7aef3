"""The index of a checkpoint of which each rank wrote a part: where the elements of each tensor are; without torch.

The format is in docs/reference/checkpoint_format.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.errors import CheckpointDamagedError
from hpctrain.files import parse_json
from hpctrain.run.region import Region

INDEX = "index.json"


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Where a part of a tensor is.

    Attributes:
        region: of the part.
        file: its name.
        offset: of what torch.save wrote, in bytes from the beginning of the file.
        bytes: of what torch.save wrote.
        data_offset: of the elements, which are contiguous and little-endian, in bytes from the beginning of the file.
    """

    region: Region
    file: str
    offset: int
    bytes: int
    data_offset: int

    def as_list(self) -> list[Any]:
        """The place as JSON has it."""
        return [
            list(self.region.offsets),
            list(self.region.sizes),
            self.file,
            self.offset,
            self.bytes,
            self.data_offset,
        ]

    @classmethod
    def from_list(cls, values: Any) -> ChunkPlace:
        """Read a result of `as_list`.

        Raises:
            ValueError: it isn't one.
        """
        offsets, sizes, file, *numbers = values
        if not isinstance(file, str) or len(numbers) != 3 or len(offsets) != len(sizes):
            raise ValueError("not a place")
        if not all(isinstance(number, int) and number >= 0 for number in (*offsets, *sizes, *numbers)):
            raise ValueError("not a place")
        return cls(Region(tuple(offsets), tuple(sizes)), file, *numbers)


@dataclass(frozen=True, slots=True)
class IndexedTensor:
    """A tensor, and where its parts are.

    Attributes:
        shape: of the whole tensor.
        dtype: such as `float32`.
        chunks: which together are the tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[ChunkPlace, ...]


def encode_index(tensors: Mapping[str, IndexedTensor]) -> bytes:
    """Return the bytes of an index."""
    record = {
        name: {"shape": list(one.shape), "dtype": one.dtype, "chunks": [place.as_list() for place in one.chunks]}
        for name, one in sorted(tensors.items())
    }
    return json.dumps(record, separators=(",", ":")).encode()


def decode_index(data: bytes) -> dict[str, IndexedTensor]:
    """Read a result of `encode_index`.

    Raises:
        CheckpointDamagedError: it isn't one.
    """
    try:
        return {name: _tensor(one) for name, one in parse_json(data).items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointDamagedError(f"{INDEX} isn't an index of tensors") from None


def _tensor(record: Any) -> IndexedTensor:
    shape, dtype = tuple(record["shape"]), record["dtype"]
    chunks = tuple(map(ChunkPlace.from_list, record["chunks"]))
    if not isinstance(dtype, str) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError("not a tensor")
    if not all(_is_inside(place, shape) for place in chunks):
        raise ValueError("not a part of the tensor")
    return IndexedTensor(shape, dtype, chunks)


def _is_inside(place: ChunkPlace, shape: tuple[int, ...]) -> bool:
    region = place.region
    return (
        len(shape) == len(region.sizes)
        and all(begin + size <= end for begin, size, end in zip(region.offsets, region.sizes, shape, strict=True))
        and place.offset <= place.data_offset <= place.offset + place.bytes
    )

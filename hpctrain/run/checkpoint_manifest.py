"""The manifest of a checkpoint, with its files, and the index of one of which each rank wrote a part; without torch.

The format is in docs/reference/checkpoint_format.md.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from hpctrain.errors import CheckpointDamagedError
from hpctrain.files import parse_json, read_bytes
from hpctrain.run.record_fields import COUNT, TEXT, TIME, by_name, describe_wrong_field

INDEX = "index.json"
FORMAT_VERSION = 1
"""Of a checkpoint that rank zero wrote whole."""
SHARDED_VERSION = 2
"""Of a checkpoint of which each rank of a mesh wrote its part."""
ALGORITHM = "xxh3_128"
MANIFEST = "manifest.json"
PARTS = ("optimizer.pt", "model.pt", "state.pt")
SAFETENSORS = "model.safetensors"
STATE = "state.pt"
METADATA = ".metadata"
"""The description that torch.distributed.checkpoint reads."""
FILES = frozenset({MANIFEST, *PARTS, SAFETENSORS, INDEX, METADATA})
"""Every file that a checkpoint may have, but those of `RANK_FILE`."""
RANK_FILE = re.compile(r"__\d+_\d+\.distcp")
"""The files that each rank of a mesh writes."""
_FIELD_TYPES = {
    **dict.fromkeys(("format_version", "step", "samples_seen", "world_size"), COUNT),
    **dict.fromkeys(("algorithm", "config_digest", "weights_digest"), TEXT),
    "time": TIME,
    "files": by_name({"bytes": COUNT, "checksum": TEXT}, ("bytes", "checksum")),
}


class ManifestUnreadableError(CheckpointDamagedError):
    """The file system failed to read a manifest."""


class OtherVersionError(CheckpointDamagedError):
    """A manifest of another format."""


def is_known_name(name: str) -> bool:
    """Whether a checkpoint may have a file of this name."""
    return name in FILES or RANK_FILE.fullmatch(name) is not None


def encode_manifest(record: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest: the record, and a checksum over it in its canonical form."""
    return (json.dumps({**record, "checksum": _record_checksum(record)}, indent=2) + "\n").encode()


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of the checkpoint at ``path``, without its own checksum.

    Raises:
        CheckpointDamagedError: it is missing or damaged; the message contains only the problem.
        ManifestUnreadableError: the file system failed to read it.
        OtherVersionError: its format is one that this version of hpctrain can't read.
    """
    file = path / MANIFEST
    try:
        data = read_bytes(file)
    except FileNotFoundError:
        raise CheckpointDamagedError(f"{MANIFEST} is missing" if path.is_dir() else "no such directory") from None
    except OSError as error:
        raise ManifestUnreadableError(f"{MANIFEST} can't be read: {error.strerror}") from error
    try:
        record = parse_json(data)
    except ValueError:
        raise CheckpointDamagedError(f"{MANIFEST} is not JSON: damaged or cut off") from None
    checksum = record.pop("checksum", None) if isinstance(record, dict) else None
    # the second comparison finds a flipped bit in the white space, which parses as the same record
    if checksum != _record_checksum(record) or data != encode_manifest(record):
        raise CheckpointDamagedError(f"{MANIFEST} doesn't match its own checksum")
    # before the fields: another version may have different ones
    version = record.get("format_version")
    if version not in (FORMAT_VERSION, SHARDED_VERSION) or record.get("algorithm") != ALGORITHM:
        raise OtherVersionError(
            f"its format is version {version} with {record.get('algorithm')} checksums; "
            f"this hpctrain reads versions {FORMAT_VERSION} and {SHARDED_VERSION} with {ALGORITHM}"
        )
    wrong = describe_wrong_field(record, _FIELD_TYPES, required=tuple(_FIELD_TYPES))
    if wrong or not all(map(_is_name, record["files"])):
        raise CheckpointDamagedError(f"{MANIFEST} lacks fields of the format")
    return dict(record)


def _is_name(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _record_checksum(record: object) -> str:
    canonical = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(canonical.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Region:
    """A box inside a tensor; of a tensor without dimensions, all of it.

    Attributes:
        offsets: where it begins, by dimension.
        sizes: by dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def intersect(self, other: Region) -> Region | None:
        """Return the box that lies in both; None if it has no elements."""
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(
            min(mine + size, yours + other_size)
            for mine, size, yours, other_size in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Region(begins, sizes) if all(size > 0 for size in sizes) else None

    def relative_to(self, outer: Region) -> Region:
        """Return the same box, with offsets counted from the begin of a box around it."""
        offsets = tuple(offset - begin for offset, begin in zip(self.offsets, outer.offsets, strict=True))
        return Region(offsets, self.sizes)

    def slices(self) -> tuple[slice, ...]:
        """Slices that select the box from the whole tensor."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Location of a part of a tensor in a file.

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
        """The place, for JSON."""
        return [self.region.offsets, self.region.sizes, self.file, self.offset, self.bytes, self.data_offset]

    @classmethod
    def from_list(cls, values: Any) -> ChunkPlace:
        """Read a result of `as_list`.

        Raises:
            ValueError: it isn't one.
        """
        offsets, sizes, file, *numbers = values
        are_counts = all(isinstance(number, int) and number >= 0 for number in (*offsets, *sizes, *numbers))
        if not isinstance(file, str) or len(numbers) != 3 or len(offsets) != len(sizes) or not are_counts:
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
    record = {}
    for name, tensor in sorted(tensors.items()):
        chunks = [place.as_list() for place in tensor.chunks]
        record[name] = {"shape": list(tensor.shape), "dtype": tensor.dtype, "chunks": chunks}
    return json.dumps(record, separators=(",", ":")).encode()


def decode_index(data: bytes) -> dict[str, IndexedTensor]:
    """Read a result of `encode_index`.

    Raises:
        CheckpointDamagedError: it isn't one.
    """
    try:
        return {name: _tensor(record) for name, record in parse_json(data).items()}
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

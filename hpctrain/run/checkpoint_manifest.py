"""The manifest of a checkpoint: the names of its files, their sizes and checksums, read without torch.

The format is in docs/reference/checkpoint_format.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from hpctrain.errors import CheckpointDamagedError
from hpctrain.files import parse_json, read_bytes
from hpctrain.run.record_fields import COUNT, TEXT, TIME, describe_wrong_field
from hpctrain.run.tensor_index import INDEX

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
    if describe_wrong_field(record, _FIELD_TYPES, required=tuple(_FIELD_TYPES)) or not _are_files(record.get("files")):
        raise CheckpointDamagedError(f"{MANIFEST} lacks fields of the format")
    return dict(record)


def _are_files(files: object) -> bool:
    types = {"bytes": COUNT, "checksum": TEXT}
    return isinstance(files, dict) and all(
        isinstance(entry, dict)
        and not describe_wrong_field(entry, types, required=("bytes", "checksum"))
        and _is_name(name)
        for name, entry in files.items()
    )


def _is_name(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _record_checksum(record: object) -> str:
    canonical = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(canonical.encode()).hexdigest()

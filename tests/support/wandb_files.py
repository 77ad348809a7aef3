"""Reads W&B's offline files, with wandb's own messages.

A file is a LevelDB log: a header of 7 bytes, then blocks of 32 KiB with records, which are split where a block ends:
checksum (4 bytes), length (2), kind (1: whole, 2: first, 3: middle, 4: last part).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER_BYTES = 7
BLOCK_BYTES = 32 * 2**10
LAST_PART = (1, 4)


def records(path: Path) -> Iterator[Any]:
    """The records of a ``.wandb`` file."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, part = path.read_bytes(), HEADER_BYTES, b""
    while position + HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < HEADER_BYTES:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += HEADER_BYTES
        part += data[position : position + length]
        position += length
        if kind in LAST_PART:
            yield Record.FromString(part)
            part = b""


def rows(path: Path) -> list[dict[str, Any]]:
    """The history, without W&B's own fields but the step."""
    found = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            row: dict[str, Any] = {}
            for item in record.history.item:
                *outer, last = item.nested_key or [item.key]
                place = row
                for key in outer:
                    place = place.setdefault(key, {})
                place[last] = json.loads(item.value_json)
            found.append({key: value for key, value in row.items() if key == "_step" or not key.startswith("_")})
    return found

"""The files that TensorBoard reads: their names and their framing.

Written without TensorBoard's own writer, which takes 0.1 s to import, starts a thread, and keeps records for up to two
minutes. A record is 16 bytes of frame around a protocol buffer (TFRecord, as in tensorboard's `record_writer.py`).
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from pathlib import Path

_CASTAGNOLI = 0x82F63B78
_MASK_DELTA = 0xA282EAD8


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_CASTAGNOLI if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_TABLE = _crc_table()


def masked_crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli, RFC 3720 appendix B.4) of ``data``, rotated by 15 bits and offset, as TFRecord wants it."""
    crc, table = 0xFFFFFFFF, _TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def frame(data: bytes) -> bytes:
    """One record: length, its checksum, the data, their checksum; little-endian."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data))))


def event_files(directory: Path) -> list[Path]:
    """The event files in ``directory``, in the order in which TensorBoard reads them."""
    return sorted(directory.glob("events.out.tfevents.*"))


def make_event_file(directory: Path) -> Path:
    """Make an empty event file that is read after all that are there, whatever the clocks of earlier hosts said.

    Args:
        directory: made where it isn't there.

    Raises:
        OSError: it can't be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    second = int(time.time())
    for path in event_files(directory):
        if match := re.match(r"events\.out\.tfevents\.(\d+)\.", path.name):
            second = max(second, int(match[1]) + 1)
    path = directory / f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}"
    path.touch(exist_ok=False)
    return path

"""How fast a node writes to the file system of the runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

CHUNK_BYTES = 4 << 20
MOST_BYTES = 64 << 20
LONGEST_S = 5.0
SHARE_OF_FREE = 8
"""At most this fraction of the free space is written."""


def write_bytes_per_s(folder: Path, name: str) -> float:
    """Write a file and fsync it; return bytes per second.

    At most `MOST_BYTES` are written, for about `LONGEST_S` at most; the file is removed.

    Args:
        folder: on the file system.
        name: of the file, another one for each node.

    Raises:
        OSError: the file system's error.
    """
    system = os.statvfs(folder)
    most = min(MOST_BYTES, system.f_bavail * system.f_frsize // SHARE_OF_FREE)
    chunk = os.urandom(min(CHUNK_BYTES, max(1, most)))  # random, since some file systems compress
    path = folder / name
    begin, written = time.perf_counter(), 0
    try:
        with path.open("wb", buffering=0) as file:
            while written < most and time.perf_counter() - begin < LONGEST_S:
                written += file.write(chunk) or 0
            os.fsync(file.fileno())
        return written / (time.perf_counter() - begin)
    finally:
        path.unlink(missing_ok=True)

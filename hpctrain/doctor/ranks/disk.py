"""How fast a node writes to the file system of the runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hpctrain.files import errors_naming

CHUNK_BYTES = 4 << 20
MOST_BYTES = 32 << 20
LONGEST_S = 5.0
SHARE_OF_FREE = 8
"""At most this fraction of the free space is written, by all nodes together."""


def write_bytes_per_s(folder: Path, name: str, *, writers: int = 1) -> float:
    """Write a file and fsync it, twice; return the bytes per second of the faster one.

    At most `MOST_BYTES` are written, for about `LONGEST_S` at most; the file is removed.

    Args:
        folder: on the file system.
        name: of the file, another one for each node.
        writers: nodes that write at the same time.

    Raises:
        OSError: the file system's error.
    """
    return max(_written_per_s(folder, name, writers) for _ in range(2))


def _written_per_s(folder: Path, name: str, writers: int) -> float:
    system = os.statvfs(folder)
    most = min(MOST_BYTES, system.f_bavail * system.f_frsize // (SHARE_OF_FREE * writers))
    chunk = os.urandom(min(CHUNK_BYTES, max(1, most)))  # random, since some file systems compress
    path = folder / name
    begin, written = time.perf_counter(), 0
    try:
        with errors_naming(path), path.open("wb", buffering=0) as file:
            while written < most and time.perf_counter() - begin < LONGEST_S:
                written += file.write(chunk) or 0
            os.fsync(file.fileno())
        return written / (time.perf_counter() - begin)
    finally:
        path.unlink(missing_ok=True)

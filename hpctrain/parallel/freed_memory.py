"""Give freed memory back to the system where blocks of weights come and go, on the CPU."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3
_MAPPED_FROM_BYTES = 4 << 20


def return_freed_memory() -> None:
    """Have glibc's malloc map each large tensor by itself, so that its memory is returned as soon as it is freed.

    By default, malloc raises its bound (mallopt(3), M_MMAP_THRESHOLD) up to 32 MiB as such memory is freed, and takes
    what is below it from heaps, where small tensors between gathered blocks keep most of the freed memory. A rank then
    holds several times the memory of its shards. A fixed bound costs the page faults of the largest tensors.
    """
    allocator = ctypes.CDLL(None)
    if hasattr(allocator, "mallopt"):  # of glibc alone
        allocator.mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)

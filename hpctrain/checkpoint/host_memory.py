"""Fresh host memory for large tensors, at the speed of huge pages."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20
_CHUNK_BYTES = 64 << 20
_WORTH_IT_BYTES = 1 << 20


def pinned_bytes(count: int) -> int:
    """What page-locked memory of ``count`` bytes takes: torch's allocator rounds each up to a power of two.

    ATen/core/CachingHostAllocator.h of torch 2.13, unless ``pinned_max_round_threshold_mb`` in PYTORCH_ALLOC_CONF says
    otherwise.
    """
    return 1 << (count - 1).bit_length() if count else 0


def huge_pages(count: int) -> memoryview:
    """Fresh memory of ``count`` bytes, of zeros; it goes back to the kernel with whatever uses it last.

    A forked process, such as one that loads data, doesn't have it (MADV_DONTFORK): otherwise the first step after the
    fork would copy each page, and the child keep the old ones for as long as it lives.

    The kernel hands out fresh memory in pages of 4 KiB, each zeroed in a fault of its own, which takes longer than
    copying into it. Huge pages (madvise(2), MADV_HUGEPAGE) take half the time for both together; where there are none,
    it is ordinary memory.

    Raises:
        OSError: there is not so much.
    """
    memory = mmap.mmap(-1, count + 2 * _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            with suppress(OSError):  # a kernel without it
                memory.madvise(getattr(mmap, advice))
    first = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % _HUGE_PAGE_BYTES
    return memoryview(memory)[first : first + count]


class HostMemory:
    """Gives memory for tensors that are written at once and kept, in huge pages.

    Each tensor has a storage of its own, so that saving one saves nothing else; a chunk goes back to the kernel with
    the last of its tensors.
    """

    def __init__(self) -> None:
        self._chunk = memoryview(b"")
        self._next = 0

    def empty_like(self, tensor: Tensor) -> Tensor:
        """An uninitialised tensor on the CPU, in the shape, dtype and order of elements of ``tensor``."""
        if tensor.nbytes < _WORTH_IT_BYTES:
            return torch.empty_like(tensor, device="cpu", requires_grad=False)
        form = torch.empty_like(tensor, device="meta")
        flat = self._take(form.nbytes).view(form.dtype)
        return flat.as_strided(form.shape, form.stride())

    def _take(self, count: int) -> Tensor:
        if self._next + count > len(self._chunk):
            self._chunk, self._next = huge_pages(max(count, _CHUNK_BYTES)), 0
        taken = torch.frombuffer(self._chunk, dtype=torch.uint8, count=count, offset=self._next)
        # on a page of its own: vector instructions and direct I/O like it so
        self._next += -(-count // mmap.PAGESIZE) * mmap.PAGESIZE
        return taken

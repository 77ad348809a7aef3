"""One tensor of an export, read piece by piece, so that it needn't fit into memory."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from hpctrain.run.checkpoint_manifest import Region
from hpctrain.checkpoint.stored_tensor import StoredTensor

PIECE_BYTES = 16 << 20
"""Bytes that are read at a time; more, if one row of the tensor is larger."""
_MADV_PAGEOUT = 21
"""Give pages back to the kernel without losing what is in them (madvise(2), Linux 5.4)."""
_madvise = ctypes.CDLL(None).madvise


class WeightStream:
    """The elements of a stored tensor, perhaps in another type, in row-major order.

    Attributes:
        shape: of the tensor.
        dtype: in which its elements are given.
        overflows: whether a finite element that was given became infinite in that type.

    Args:
        stored: the tensor.
        dtype: for floating-point elements; others keep their type. None keeps that as well.
    """

    def __init__(self, stored: StoredTensor, dtype: torch.dtype | None = None) -> None:
        # the elements' bytes are given as they are in memory
        assert sys.byteorder == "little"
        self._stored = stored
        self.shape = tuple(stored.shape)
        self.dtype = dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype
        self.overflows = False

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def pieces(self) -> Iterator[memoryview]:
        """Yield the elements' bytes; a piece is valid until the next one is taken.

        Raises:
            CheckpointError: a part of the tensor isn't in the checkpoint.
        """
        for region in self._regions():
            read = self._stored.read(region)
            given = read.to(self.dtype)
            if given.dtype != read.dtype and torch.finfo(given.dtype).max < torch.finfo(read.dtype).max:
                infinite = given.isinf()
                self.overflows |= bool(infinite.any()) and bool((infinite & read.isfinite()).any())
            yield _bytes(given)
            _let_go(read)

    def _regions(self) -> Iterator[Region]:
        """Yield boxes that follow each other in row-major order."""
        if not self.nbytes:
            return
        # the first axis along which a box can be cut without changing the order of its elements
        axis = next((axis for axis, size in enumerate(self.shape) if size > 1), None)
        if axis is None:
            yield Region.whole(self.shape)
            return
        size = self.shape[axis]
        itemsize = max(self._stored.dtype.itemsize, self.dtype.itemsize)
        rows = max(1, PIECE_BYTES // (math.prod(self.shape[axis + 1 :]) * itemsize))
        for first in range(0, size, rows):
            offsets = tuple(first if each == axis else 0 for each in range(len(self.shape)))
            sizes = (*self.shape[:axis], min(rows, size - first), *self.shape[axis + 1 :])
            yield Region(offsets, sizes)


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # a single element of a view may have any stride, and counts as contiguous
    found: memoryview = flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data
    return found


def _let_go(tensor: Tensor) -> None:
    """Unmap the pages of a file that only this tensor uses: they would count as this process's memory until its end."""
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if tensor.is_contiguous() and begin < end:
        # an older kernel refuses: the pages then stay until others need the memory
        _madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_PAGEOUT)

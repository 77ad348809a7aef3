"""The operations that building a model runs, in their order, with what is needed to run them again."""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

COPIED_BYTES = 1 << 20
"""Most bytes of a tensor with data that a tape copies; of a larger one it keeps the tensor itself."""

MAPPED_BYTES = 1 << 20
"""Least size of a storage that has its memory from the kernel, not from malloc."""


class DeferredBuildError(Exception):
    """A model whose building can't be deferred: the caller builds it the ordinary way.

    No user sees it, so it isn't an `HpctrainError`.
    """


@dataclass(frozen=True, slots=True)
class RecordedTensor:
    """A tensor without data, as a view of a storage of the tape.

    Attributes:
        storage: address of the storage, which the tape keeps alive.
        dtype: of the tensor.
        size: of the tensor.
        stride: of the tensor, in elements.
        offset: of its first element in the storage, in elements.
        is_conj: whether it is a lazy conjugate of what is stored.
        is_neg: whether it is a lazy negative of what is stored.
    """

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> RecordedTensor:
        """Describe a tensor on the meta device."""
        return cls(
            tensor.untyped_storage()._cdata,
            tensor.dtype,
            tuple(tensor.size()),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def view(self, storage: torch.UntypedStorage) -> Tensor:
        """Return this view of another storage, on the CPU."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        if self.is_conj:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if self.is_neg else tensor

    @property
    def span_bytes(self) -> int:
        """Bytes from the first element to the end of the last one."""
        steps = [stride * (size - 1) for stride, size in zip(self.stride, self.size, strict=True)]
        return self.dtype.itemsize * (sum(steps) + 1) if 0 not in self.size else 0

    def covers(self, size_bytes: int) -> bool:
        """Whether this view has each byte of a storage of ``size_bytes`` once."""
        dense = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size == 1:
                continue
            if stride != dense:
                return False
            dense *= size
        return dense * self.dtype.itemsize == size_bytes


@dataclass(eq=False, slots=True)
class Constant:
    """A tensor that has data and is an argument of a recorded operation, or a part of the model."""

    tensor: Tensor


Source = RecordedTensor | Constant
"""Where the values of a tensor come from: recorded operations, or the tensor itself."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Random numbers that an operation draws: the generator, and its state before."""

    generator: torch.Generator
    state: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A call of one of torch's operators.

    Attributes:
        operator: an overload of `torch.ops`.
        arguments: by position, for the CPU; each tensor is replaced by its `Source`.
        keywords: by name, in the same way.
        outputs: of each tensor that it returned, the view of its new storage, or None if an argument has the storage.
        reads: storages whose content it depends on.
        writes: storages that it changes or makes.
        default_dtype: `torch.get_default_dtype()` at the call, on which types of results depend.
        draw: None if it draws no random numbers.
    """

    operator: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    outputs: tuple[RecordedTensor | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    default_dtype: torch.dtype
    draw: Draw | None

    @property
    def storages(self) -> frozenset[int]:
        """All storages that it concerns."""
        return self.reads | self.writes


def new_storage(size_bytes: int) -> torch.UntypedStorage:
    """Return a storage on the CPU with any content."""
    if size_bytes < MAPPED_BYTES:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
    # small objects that are allocated between two large ones keep malloc from giving the memory back
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # most of the time of a fill would go into faults of small pages; a kernel without large ones refuses
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


class Tape:
    """Operations in their order, and the storages that they concern.

    Attributes:
        operations: in their order.
        refusal: why the build can't be deferred; None while it can.
        is_complete: whether the build is over.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.refusal: DeferredBuildError | None = None
        self.is_complete = False
        # alive as long as the tape, so that no other storage gets the address of one
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._writers: dict[int, list[int]] = {}
        self._last_uses: dict[int, int] = {}
        self._borrowed: dict[int, list[Constant]] = {}

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's values come from recorded operations."""
        return tensor.is_meta and tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._storages

    def source(self, tensor: Tensor) -> Source:
        """Describe an argument of an operation by its present values, which later writes don't change."""
        if self.holds(tensor):
            return RecordedTensor.of(tensor)
        found = Constant(tensor.detach())
        if tensor.layout is torch.strided and not tensor.is_meta:
            if tensor.nbytes <= COPIED_BYTES:
                # also because NumPy, unlike torch, can change it unseen
                found.tensor = found.tensor.clone()
            else:
                self._borrowed.setdefault(tensor.untyped_storage()._cdata, []).append(found)
        return found

    def protect(self, tensor: Tensor) -> None:
        """Prepare for a write to a tensor with data: operations that have it as an argument get a copy."""
        if tensor.layout is torch.strided:
            for constant in self._borrowed.pop(tensor.untyped_storage()._cdata, []):
                constant.tensor = constant.tensor.clone()

    def adopt(self, tensor: Tensor) -> RecordedTensor | None:
        """Take in the storage of an operation's result, and describe the result; None if the storage isn't new.

        Raises:
            DeferredBuildError: the result has no storage, as a sparse tensor.
        """
        if self.holds(tensor):
            return None
        if tensor.layout is not torch.strided or not tensor.is_meta:
            self.refuse(f"a result is a {tensor.layout} tensor on {tensor.device}")
        found = RecordedTensor.of(tensor)
        self._storages[found.storage] = tensor.untyped_storage()
        return found

    def add(self, operation: Operation) -> None:
        """Record the next operation."""
        index = len(self.operations)
        self.operations.append(operation)
        for storage in operation.writes:
            self._writers.setdefault(storage, []).append(index)
        for storage in operation.storages:
            self._last_uses[storage] = index

    def refuse(self, problem: str) -> NoReturn:
        """Give up, even if the code that builds the model catches the error.

        Raises:
            DeferredBuildError: always.
        """
        self.refusal = self.refusal or DeferredBuildError(problem)
        raise self.refusal

    def size_bytes(self, storage: int) -> int:
        """Size of a storage."""
        return self._storages[storage].nbytes()

    def last_use(self, storage: int) -> int:
        """Index of the last operation that concerns a storage."""
        return self._last_uses[storage]

    def writers(self, storage: int, before: int, after: int) -> Iterator[int]:
        """Indices of the operations that write a storage, the last one first, both bounds excluded."""
        writers = self._writers.get(storage, [])
        for position in range(bisect_left(writers, before) - 1, -1, -1):
            if writers[position] <= after:
                return
            yield writers[position]

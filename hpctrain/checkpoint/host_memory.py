"""Host memory: the available amount, fresh memory in huge pages, and copies of whole trees of tensors."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpctrain.checkpoint.page_locked import PageLockedMemory
from hpctrain.errors import CheckpointError, TaskError
from hpctrain.parallel.local_part import local_part
from hpctrain.run.process import memory_cgroups

_HUGE_PAGE_BYTES = 2 << 20
_CHUNK_BYTES = 64 << 20
_CHUNKED_FROM_BYTES = 1 << 20
_STORED_AS_THEY_ARE = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_GROUP_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
"""A cgroup's files with the memory limit and the memory in use, by cgroup version."""


def available_memory_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the available bytes of the machine, or of the job's control groups if those are fewer; None if unknown.

    proc(5), MemAvailable; cgroups(7).

    Args:
        proc: where procfs is mounted.
        groups: where control groups are mounted.
    """
    # the limits of all groups above apply as well
    in_groups = (_free_in_group(group, *_GROUP_FILES[version]) for version, group in memory_cgroups(proc, groups))
    free_bytes = [_free_on_machine(proc / "meminfo"), *in_groups]
    return min((count for count in free_bytes if count is not None), default=None)


def huge_pages(count: int) -> memoryview:
    """Return ``count`` bytes of fresh, zeroed memory, in huge pages if the kernel has them.

    The memory is freed with the last tensor that uses it.

    Raises:
        OSError: there isn't enough memory.
    """
    memory = mmap.mmap(-1, count + 2 * _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # MADV_HUGEPAGE: zeroing 4 KiB per page fault takes longer than the copy; with huge pages both take half the time.
    # MADV_DONTFORK: otherwise the first write after forking a DataLoader worker would copy each page, and the worker
    # would keep the old one.
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            with suppress(OSError):  # a kernel without it
                memory.madvise(getattr(mmap, advice))
    first = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % _HUGE_PAGE_BYTES
    return memoryview(memory)[first : first + count]


class HostMemory:
    """Memory for tensors that are written at once and then kept.

    Each tensor has its own storage, so that saving one saves nothing else. A chunk of memory is freed with the
    last of its tensors.
    """

    def __init__(self) -> None:
        self._chunk = memoryview(b"")
        self._next = 0

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialized tensor on the CPU, with the shape, dtype and order of elements of ``tensor``."""
        if tensor.nbytes < _CHUNKED_FROM_BYTES:
            return torch.empty_like(tensor, device="cpu", requires_grad=False)
        return _view_like(self._take(tensor.nbytes), tensor)

    def _take(self, count: int) -> Tensor:
        if self._next + count > len(self._chunk):
            self._chunk = huge_pages(max(count, _CHUNK_BYTES))
            self._next = 0
        memory = torch.frombuffer(self._chunk, dtype=torch.uint8, count=count, offset=self._next)
        # each tensor begins on its own page: vector instructions and direct I/O need aligned memory
        self._next += -(-count // mmap.PAGESIZE) * mmap.PAGESIZE
        return memory


class HostCopy:
    """Copies trees of tensors, numbers, strings, dicts, lists and tuples, so that training may change the originals.

    Equal tensors that share memory (tied weights) share it in the copy. Strides are kept, since kernels may choose
    their order of summation by them. The copy can be read by ``torch.load(weights_only=True)``: subclasses such as
    ``np.float64`` become plain numbers, and a value without such a form is an error. The tensors of a copy hold their
    values only after `finish`, which copies all of them in one go, at full speed.

    Args:
        everything: whether to copy tensors in host memory, too; False is for saves during which training waits.
        page_locked: memory for the copies from a GPU, slow to lock, so only for a copy that is kept; None for ordinary
            memory.
    """

    def __init__(self, *, everything: bool = True, page_locked: PageLockedMemory | None = None) -> None:
        self._everything = everything
        self._page_locked = page_locked
        self._memory = HostMemory()
        # the source is kept alive with its copy: its address identifies it
        self._copies: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        self._used_buffers: set[int] = set()

    def of(self, value: Any, buffers: Any = None, name: str = "") -> Any:
        """Return a copy of ``value``.

        Args:
            value: the tree.
            buffers: an earlier copy; its tensors are overwritten if their place, shape and dtype are the same.
            name: what to call ``value`` in an error.

        Raises:
            CheckpointError: a value in the tree can't be stored in a checkpoint; the message names its place.
        """
        if type(value) in _STORED_AS_THEY_ARE:
            return value
        if isinstance(value, Tensor):
            return self._tensor(value, buffers, name)
        if isinstance(value, Mapping):
            named_buffers = buffers if isinstance(buffers, dict) else {}
            return {
                _plain_key(key, name): self.of(item, named_buffers.get(key), f"{name}[{key!r}]")
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            fits = isinstance(buffers, list | tuple) and len(buffers) == len(value)
            copies = [self.of(item, buffers[i] if fits else None, f"{name}[{i}]") for i, item in enumerate(value)]
            return tuple(copies) if isinstance(value, tuple) else copies
        return _plain_value(value, name)

    def finish(self) -> None:
        """Copy the tensors, and return when all copies hold their values; the originals must not have changed."""
        copies = [(source, target) for source, target in self._copies.values() if target is not source]
        for source, target in copies:
            target.copy_(source, non_blocking=True)
        for device in {source.device for source, _ in copies if source.device.type != "cpu"}:
            torch.accelerator.current_stream(device).synchronize()

    def _tensor(self, tensor: Tensor, buffer: Any, name: str) -> Tensor:
        # `LiveShards` copies shards, and knows where they belong; here a DTensor only has to be one that can be copied
        source = local_part(tensor).detach()
        if type(source) is not Tensor or source.layout != torch.strided or source.is_quantized or source.is_meta:
            raise CheckpointError(
                f"{name} is a {type(source).__name__} ({source.layout}, {source.device}); "
                "a checkpoint holds dense tensors: leave it out of the state, or convert it"
            )
        identity = sharing_key(source)
        if (copied := self._copies.get(identity)) is not None and source.numel():
            return copied[1]
        target = self._target(source, buffer)
        self._copies[identity] = source, target
        self._used_buffers.add(id(target))
        return target

    def _target(self, source: Tensor, buffer: Any) -> Tensor:
        if not self._everything and _owns_its_storage(source):
            return source
        if isinstance(buffer, Tensor) and id(buffer) not in self._used_buffers and _same_form(buffer, source):
            return buffer
        # into any other memory, the driver copies through a page-locked buffer of its own, several times slower
        if self._page_locked is not None and self._page_locked.serves(source) and source.nbytes:
            memory = self._page_locked.take(source.nbytes)
            if memory is not None:
                return _view_like(memory, source)
        return self._memory.empty_like(source)


class _NoCopy(HostCopy):
    """Visits a tree as a copy does, and leaves its tensors where they are."""

    def _target(self, source: Tensor, buffer: Any) -> Tensor:  # noqa: ARG002 - as in the base class
        return source


def plain_copy(value: Any, name: str, copy: HostCopy | None = None) -> Any:
    """Return a copy of a state that a user's class returned, in the form in which a checkpoint holds it.

    Args:
        value: the tree.
        name: what to call ``value`` in an error.
        copy: makes the copy; None for one that shares nothing with other copies.

    Raises:
        TaskError: a value can't be stored; the message names its place, beginning with ``name``.
    """
    copy = copy or HostCopy()
    try:
        plain = copy.of(value, name=name)
    except CheckpointError as error:
        raise TaskError(str(error)) from None
    copy.finish()
    return plain


def require_storable(value: Any, name: str) -> None:
    """Check that a checkpoint can hold a state that a user's class returned, without copying its tensors.

    Args:
        value: the tree.
        name: what to call ``value`` in an error.

    Raises:
        TaskError: a value can't be stored; the message names its place, beginning with ``name``.
    """
    plain_copy(value, name, _NoCopy())


def sharing_key(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors that can share one copy, such as tied weights."""
    lazy = tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), lazy


def element_bytes(tensor: Tensor) -> Tensor:
    """Return the elements' bytes in row-major order, as uint8 of shape [n]: a view, or a copy where that needs one."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # not reshape, which keeps the stride of a single element, whatever it is
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _view_like(memory: Tensor, like: Tensor) -> Tensor:
    """View bytes as a tensor with the shape, dtype and order of elements of ``like``."""
    form = torch.empty_like(like, device="meta")
    return memory.view(form.dtype).as_strided(form.shape, form.stride())


def _plain_key(key: object, name: str) -> str | int:
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, int):
        return int(key)
    raise CheckpointError(f"{name} has the key {key!r}; a checkpoint's dicts have strings and integers as keys")


def _plain_value(value: Any, name: str) -> object:
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in _STORED_AS_THEY_ARE:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    kinds: tuple[Any, ...] = (int, float, complex, bytes)
    for kind in kinds:
        if isinstance(value, kind):
            return kind(value)
    raise CheckpointError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint holds tensors, numbers, "
        "strings, dicts, lists and tuples: convert it"
    )


def _owns_its_storage(source: Tensor) -> bool:
    # torch.save writes the whole storage that a view belongs to
    return (
        source.device.type == "cpu"
        and source.untyped_storage().nbytes() == source.nbytes
        and not (source.is_conj() or source.is_neg())
    )


def _same_form(buffer: Tensor, source: Tensor) -> bool:
    if (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
        return False
    # a copy of a view with gaps closes them; compare strides first: making a meta tensor takes longer than a small copy
    return buffer.stride() == source.stride() or buffer.stride() == torch.empty_like(source, device="meta").stride()


def _free_on_machine(meminfo: Path) -> int | None:
    for line in _lines(meminfo):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _free_in_group(group: Path, limit_name: str, use_name: str) -> int | None:
    limit = _number(group / limit_name)
    use = _number(group / use_name)
    if limit is None or use is None:
        return None
    # a group's page cache counts as use, but the kernel reclaims it before an allocation fails
    cache = sum(
        int(line.split()[1])
        for line in _lines(group / "memory.stat")
        if line.split()[0] in {"inactive_file", "active_file"}
    )
    return max(0, limit - max(0, use - cache))


def _number(file: Path) -> int | None:
    # the text is "max" without a limit
    text = "".join(_lines(file))
    return int(text) if text.isdigit() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []

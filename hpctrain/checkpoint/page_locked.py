"""Page-locked host memory, into which a GPU copies at full speed; it is locked ahead, in a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from hpctrain.phrases import scaled

log = logging.getLogger("hpctrain.checkpoint")

LARGEST_BLOCK_BYTES = 256 << 20
"""Largest size of a block, unless a tensor needs more; the driver holds a lock during each allocation."""
SMALLEST_BLOCK_BYTES = 1 << 20
ALIGNMENT = 512
"""Bytes by which places in a block are aligned, as torch aligns tensors on a GPU."""


@dataclass(frozen=True, slots=True)
class Block:
    """One page-locked allocation.

    Attributes:
        num_bytes: its size, a power of two: torch's allocator would round up to one (ATen/core/CachingHostAllocator.h
            of torch 2.13).
        tensor_bytes: size of each tensor in it, in the order of their addresses.
    """

    num_bytes: int
    tensor_bytes: tuple[int, ...]


def plan_blocks(sizes: Iterable[int]) -> list[Block]:
    """Choose blocks for tensors: the largest tensors first, each in the first block that has room.

    The last blocks become smaller and smaller, so that little is left over. For GPT-2 with AdamW, 9 blocks take 1.01
    times the size of the tensors; one allocation for each tensor took 1.66 times, in 592 allocations.

    Args:
        sizes: bytes of each tensor, above 0.
    """
    # pinned_max_round_threshold_mb in PYTORCH_ALLOC_CONF would spare the rounding, but torch 2.13 then reuses freed
    # allocations of the same power of two without comparing their sizes (CachingHostAllocator.h, get_free_block)
    remaining = sorted(sizes, reverse=True)
    blocks = []
    while remaining:
        total = min(sum(map(_aligned, remaining)), LARGEST_BLOCK_BYTES)
        num_bytes = max(SMALLEST_BLOCK_BYTES, 1 << (total.bit_length() - 1), _power_of_two(remaining[0]))
        fitting, unplaced, free_bytes = [], [], num_bytes
        for count in remaining:
            if _aligned(count) <= free_bytes:
                fitting.append(count)
                free_bytes -= _aligned(count)
            else:
                unplaced.append(count)
        blocks.append(Block(num_bytes, tuple(fitting)))
        remaining = unplaced
    return blocks


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def lock(count: int) -> Tensor:
    """Allocate ``count`` bytes of page-locked memory, uninitialized, as uint8.

    Raises:
        RuntimeError: the driver can't lock that much. torch raises its subclass AcceleratorError, and clears the
            error, which other calls to CUDA would report again (c10/cuda/CUDAException.cpp).
    """
    # Without the GIL: as all functions that torch generates, `empty` releases it. A thread's current device doesn't
    # matter: torch allocates in a context that exists (ATen/cuda/CachingHostAllocator.cpp).
    # Not our own memory, locked by cudaHostRegister: no copy may span two registered pieces, and it must be unlocked
    # before it is freed, in whatever order tensors and processes end.
    return torch.empty(count, dtype=torch.uint8, pin_memory=True)


class PageLockedMemory:
    """Page-locked memory for copies from a GPU; where locking fails, callers use ordinary memory instead.

    Locking is slow: 0.4 s for each GB, on an H100 with driver 580. `lock_ahead` starts a thread that locks while
    training runs, in blocks from which it cuts the memory of many tensors; what is missing then is locked in `take`,
    while the caller waits. Each tensor has a storage of its own, since torch.save writes whole storages. One thread at
    a time may call the methods.

    Args:
        lock: allocates a number of bytes as uint8, and raises a RuntimeError if it can't.
        device_type: of the tensors whose copies are in this memory.
        clock: monotonic seconds.

    Attributes:
        waited_s: seconds for which callers have waited until memory was locked.
    """

    def __init__(
        self,
        lock: Callable[[int], Tensor] = lock,
        *,
        device_type: str = "cuda",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.waited_s = 0.0
        self._lock = lock
        self._device_type = device_type
        self._clock = clock
        self._ready: dict[int, list[Tensor]] = {}
        self._requested: Counter[int] = Counter()
        self._block_sizes: list[int] = []
        self._thread: threading.Thread | None = None
        self._caller_waits = threading.Event()
        self._stopped = False
        self._has_failed = False

    @property
    def locked_bytes(self) -> int:
        """The size of all blocks, taken or not."""
        return sum(self._block_sizes)

    def serves(self, tensor: Tensor) -> bool:
        """Whether the tensor's copy is in this memory."""
        return tensor.device.type == self._device_type

    def missing_bytes(self, sizes: Iterable[int]) -> int:
        """Return the host memory that tensors take beyond what is locked and not taken yet, page-locked or not.

        Args:
            sizes: bytes of each tensor, above 0.
        """
        ready = Counter({count: len(tensors) for count, tensors in self._ready.items()})
        missing = (Counter(sizes) - ready).elements()
        if self._is_closed():
            return sum(missing)
        return sum(block.num_bytes for block in plan_blocks(missing))

    def lock_ahead(self, sizes: Iterable[int]) -> None:
        """Lock memory in a thread, after what was requested before.

        Args:
            sizes: bytes of each tensor that will be copied, above 0; those that were requested before are not locked
                again.
        """
        missing = Counter(sizes) - self._requested
        self._requested += missing
        if not missing or self._is_closed():
            return
        for count in missing:
            self._ready.setdefault(count, [])
        # not a daemon: the interpreter must not end while the driver is at work. It waits for one allocation at most,
        # and the pause after it.
        arguments = plan_blocks(missing.elements()), self._thread
        self._thread = threading.Thread(target=self._lock_requested, args=arguments, name="page-locking")
        self._thread.start()

    def wait_until_locked(self, sizes: Iterable[int] = ()) -> None:
        """Wait until all that was requested is locked, or locking has failed; after `stop`, return at once.

        Args:
            sizes: to request first, as for `lock_ahead`.
        """
        begin = self._clock()
        self.lock_ahead(sizes)
        if self._thread is None or self._stopped:
            return
        self._caller_waits.set()
        self._thread.join()
        self._thread = None
        self._caller_waits.clear()
        self.waited_s += self._clock() - begin

    def stop(self) -> None:
        """Lock nothing from now on, not even what was requested; what is locked can still be taken."""
        self._stopped = True
        self._caller_waits.set()

    def release(self) -> None:
        """Stop, and drop the memory that wasn't taken; torch reuses a block once no tensor is in it."""
        self.stop()
        self._block_sizes.clear()
        for ready in self._ready.values():
            ready.clear()

    def take(self, count: int) -> Tensor | None:
        """Return ``count`` bytes as uint8, uninitialized; None if they have to come from ordinary memory."""
        if ready := self._ready.get(count):
            return ready.pop()
        begin = self._clock()
        tensors = self._try_lock(Block(_power_of_two(count), (count,)))
        self.waited_s += self._clock() - begin
        return tensors[0] if tensors else None

    def _lock_requested(self, blocks: list[Block], before: threading.Thread | None) -> None:
        # not at the niceness of the writing thread: training would wait for the driver's lock, and so for this thread
        if before is not None:
            before.join()
        for block in blocks:
            begin = self._clock()
            if not threading.main_thread().is_alive() or not (tensors := self._try_lock(block)):
                return
            for tensor in tensors:
                self._ready[tensor.nbytes].append(tensor)
            # cudaHostAlloc holds a lock of the driver, for which other calls to CUDA may wait, also those of other
            # processes: leave them half of the time, unless training waits for this thread anyway
            self._caller_waits.wait(self._clock() - begin)

    def _is_closed(self) -> bool:
        return self._stopped or self._has_failed

    def _try_lock(self, block: Block) -> list[Tensor]:
        """Lock a block, and return a tensor for each of its sizes; none if locking fails."""
        if self._is_closed():
            return []
        try:
            memory = self._lock(block.num_bytes)
        except (RuntimeError, MemoryError) as error:
            self._has_failed = True
            # further lines of a message of CUDA are advice on debugging kernels
            reason = (str(error).splitlines() or [repr(error)])[0]
            log.warning(
                "could not page-lock %s of host memory (%s): for the rest of this attempt, saves copy the remaining "
                "GPU tensors to ordinary memory, which makes training wait longer. Give the job more memory; if your "
                "driver respects it, raise the limit on locked memory (ulimit -l)",
                scaled(block.num_bytes, "B"),
                reason,
            )
            return []
        if self._is_closed():  # meanwhile: nothing is taken from it any more
            return []
        self._block_sizes.append(block.num_bytes)
        ends = accumulate(map(_aligned, block.tensor_bytes), initial=0)
        # not views, which would share the block's storage
        array = memory.numpy()
        return [
            torch.frombuffer(array, dtype=torch.uint8, count=count, offset=offset)
            for count, offset in zip(block.tensor_bytes, ends, strict=False)
        ]

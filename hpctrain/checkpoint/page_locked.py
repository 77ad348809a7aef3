"""Page-locked host memory, into which a GPU copies at full speed; it is locked ahead, in a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from hpctrain.phrases import scaled

log = logging.getLogger("hpctrain.checkpoint")


def page_locked_bytes(count: int) -> int:
    """Return the size of a page-locked allocation of ``count`` bytes: torch's allocator rounds up to a power of two.

    ATen/core/CachingHostAllocator.h of torch 2.13, unless ``pinned_max_round_threshold_mb`` in PYTORCH_ALLOC_CONF says
    otherwise.
    """
    return 1 << (count - 1).bit_length() if count else 0


def lock(count: int) -> Tensor:
    """Allocate ``count`` bytes of page-locked memory, uninitialized, as uint8.

    Raises:
        RuntimeError: the driver can't lock that much. torch raises its subclass AcceleratorError, and clears the
            error, which other calls to CUDA would report again (c10/cuda/CUDAException.cpp).
    """
    # Without the GIL: as all functions that torch generates, `empty` releases it. A thread's current device doesn't
    # matter: torch allocates in a context that exists (ATen/cuda/CachingHostAllocator.cpp).
    return torch.empty(count, dtype=torch.uint8, pin_memory=True)


class PageLockedMemory:
    """Page-locked memory for copies from a GPU; where locking fails, callers use ordinary memory instead.

    Locking is slow: perhaps a second for each few GB, an estimate. `lock_ahead` starts a thread that locks while
    training runs; what is missing then is locked in `take`, while the caller waits. One thread at a time may call the
    methods.

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
        self._thread: threading.Thread | None = None
        self._caller_waits = threading.Event()
        self._stopped = False
        self._has_failed = False

    @property
    def ready_bytes(self) -> int:
        """The size of what is locked and not taken yet, as `bytes_of` counts it."""
        return sum(self._size(count) * len(ready) for count, ready in self._ready.items())

    def serves(self, tensor: Tensor) -> bool:
        """Whether the tensor's copy is in this memory."""
        return tensor.device.type == self._device_type

    def bytes_of(self, tensor: Tensor) -> int:
        """Return the host memory that a tensor's copy takes, page-locked or not."""
        return self._size(tensor.nbytes) if self.serves(tensor) else tensor.nbytes

    def lock_ahead(self, sizes: Iterable[int]) -> None:
        """Lock memory in a thread, after what was requested before.

        Args:
            sizes: bytes of each tensor that will be copied; those that were requested before are not locked again.
        """
        missing = Counter(sizes) - self._requested
        self._requested += missing
        if not missing or self._stopped:
            return
        for count in missing:
            self._ready.setdefault(count, [])
        # not a daemon: the interpreter must not end while the driver is at work. It waits for one allocation at most,
        # and the pause after it.
        arguments = list(missing.elements()), self._thread
        self._thread = threading.Thread(target=self._lock_requested, args=arguments, name="page-locking")
        self._thread.start()

    def wait_until_locked(self) -> None:
        """Wait until all that was requested is locked, or locking has failed; after `stop`, return at once."""
        if self._thread is None or self._stopped:
            return
        begin = self._clock()
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
        """Stop, and give back what wasn't taken; torch keeps it for other page-locked tensors."""
        self.stop()
        for ready in self._ready.values():
            ready.clear()

    def take(self, count: int) -> Tensor | None:
        """Return ``count`` bytes as uint8, uninitialized; None if they have to come from ordinary memory."""
        if ready := self._ready.get(count):
            return ready.pop()
        begin = self._clock()
        memory = self._try_allocate(count)
        self.waited_s += self._clock() - begin
        return memory

    def _size(self, count: int) -> int:
        return count if self._stopped or self._has_failed else page_locked_bytes(count)

    def _lock_requested(self, sizes: list[int], before: threading.Thread | None) -> None:
        # not at the niceness of the writing thread: training would wait for the driver's lock, and so for this thread
        if before is not None:
            before.join()
        for count in sizes:
            begin = self._clock()
            if not threading.main_thread().is_alive() or (memory := self._try_allocate(count)) is None:
                return
            self._ready[count].append(memory)
            # cudaHostAlloc holds a lock of the driver, for which other calls to CUDA may wait, also those of other
            # processes: leave them half of the time, unless training waits for this thread anyway
            self._caller_waits.wait(self._clock() - begin)

    def _try_allocate(self, count: int) -> Tensor | None:
        if self._stopped or self._has_failed:
            return None
        try:
            return self._lock(count)
        except (RuntimeError, MemoryError) as error:
            self._has_failed = True
            # further lines of a message of CUDA are advice on debugging kernels
            reason = (str(error).splitlines() or [repr(error)])[0]
            log.warning(
                "could not page-lock %s of host memory (%s): for the rest of this attempt, saves copy the remaining "
                "GPU tensors to ordinary memory, which makes training wait longer. Give the job more memory; if your "
                "driver respects it, raise the limit on locked memory (ulimit -l)",
                scaled(count, "B"),
                reason,
            )
            return None

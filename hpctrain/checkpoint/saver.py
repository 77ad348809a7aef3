"""Save in the background: copy the state between two steps, and write the copy while the next steps run."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from hpctrain.checkpoint.host_memory import available_memory_bytes
from hpctrain.checkpoint.page_locked import PageLockedMemory
from hpctrain.checkpoint.retention import Retention, describe_shortage
from hpctrain.checkpoint.state import LiveState, Snapshot
from hpctrain.checkpoint.write import CheckpointWriter
from hpctrain.config.checkpoint import Checkpoint
from hpctrain.errors import CheckpointDamagedError, SupersededError
from hpctrain.rank.stop_request import StopRequest
from hpctrain.run.checkpoints import find_damage
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Attempt, Claim

log = logging.getLogger("hpctrain.checkpoint")

WRITER_NICENESS = 10
"""Niceness of the writing thread, so that training gets the cores first (setpriority(2), per thread on Linux)."""
MEMORY_MARGIN = 1.1
"""Free memory that a copy requires, as a multiple of its size."""
LOGGED_FROM_BYTES = 100_000_000


class Writer(Protocol):
    """Writes and publishes snapshots."""

    def write(self, snapshot: Any, /) -> Path | None:
        """Write a snapshot, make it durable, publish it, and return its directory on rank zero."""

    def size_of(self, snapshot: Any, /) -> int:
        """Return about how many bytes the checkpoint of a snapshot takes."""


class CheckpointSaver:
    """Saves whole checkpoints on rank zero, in the background or not; at most one save is in flight.

    Every rank has one. `begin` decides which of them save.

    In the background, the copy goes into buffers that are kept from save to save, so that it runs at the speed of
    memory. They take as much host memory as weights, averages and optimizer together. Before the first copy, this
    amount is logged and compared with the available memory; if it doesn't fit, training waits for each save instead.
    Copies from a GPU go to page-locked memory, which `lock_ahead` provides before the first save.

    Args:
        directory: of the run.
        claim: of this attempt.
        policy: conf/checkpoint.
        stop: requests a stop of all ranks if a write fails that no caller waits for.
        clock: monotonic seconds.
        free_bytes: returns the memory that this process may still take; None if unknown.
        page_locked: memory for the copies from a GPU.
        is_rank_zero: whether this is rank zero.

    Attributes:
        stall_s: seconds for which training waited for the last save, without the time in which memory was page-locked,
            which is no measure of the next save.
    """

    def __init__(
        self,
        directory: RunDirectory,
        claim: Claim,
        policy: Checkpoint,
        stop: StopRequest,
        *,
        clock: Callable[[], float] = time.monotonic,
        free_bytes: Callable[[], int | None] = available_memory_bytes,
        page_locked: PageLockedMemory | None = None,
        is_rank_zero: bool = True,
    ) -> None:
        self._writer: Writer = CheckpointWriter(directory, claim, safetensors=policy.safetensors)
        self._is_rank_zero = is_rank_zero
        self._takes_part = is_rank_zero
        self._retention = Retention(directory, claim, policy)
        self._directory = directory
        self._policy = policy
        self._stop = stop
        self._clock = clock
        self._free_bytes = free_bytes
        self._background = policy.asynchronous
        self._page_locked = page_locked or PageLockedMemory(clock=clock)
        self._hooks: list[RemovableHandle] = []
        self._awaiting_first_step: set[torch.optim.Optimizer] = set()
        self._buffers: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._began_at = 0.0
        self._longest_s = 0.0
        self._is_first = True
        self.stall_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether a write is in flight."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def estimated_save_s(self) -> float:
        """Estimate the seconds until a save that began now would be durable, from the longest one so far."""
        if not self.busy:
            return self._longest_s
        spent_s = self._clock() - self._began_at
        longest_s = max(self._longest_s, spent_s)
        return longest_s - spent_s + longest_s

    def live_state(self, **fields: Any) -> LiveState:
        """Return the state between two steps that `save` takes.

        Args:
            fields: of a `LiveState`.
        """
        return LiveState(**fields)

    def begin(self) -> tuple[bool, Exception | None]:
        """Agree which ranks save; collective.

        Returns:
            Whether this rank calls `save`; and an error of the save before, for which no rank does.
        """
        return self._takes_part, None

    def lock_ahead(self, state: LiveState) -> None:
        """Page-lock memory for the copies of GPU tensors in a thread, each time that an optimizer has its first state.

        Not before: only then are the sizes of its state known.

        It takes 0.4 s for each GB, and as long in pauses. The first save waits for what isn't locked by then.

        Args:
            state: of which the weights, the optimizers and ``extra`` are looked at again after these steps.
        """
        # nothing to lock: spare the optimizers the hooks
        if not (self._takes_part and self._background and any(map(self._page_locked.serves, state.model.parameters()))):
            return
        hook = partial(self._lock_after_first_step, state)
        self._awaiting_first_step = set(state.optimizers.values())
        self._hooks = [optimizer.register_step_post_hook(hook) for optimizer in self._awaiting_first_step]

    def save(self, state: LiveState, *, wait: bool, retain: bool = True) -> None:
        """Copy, and write in the background or at once.

        Args:
            state: between two steps.
            wait: return only when the checkpoint is published, or raise its error.
            retain: whether to remove older checkpoints now. False at the end of an attempt, which may have only seconds
                left: retention reads checkpoints back.

        Raises:
            CheckpointError: the copy, or the write that was waited for, failed; also that of an earlier save.
            SupersededError: a later attempt owns the run.
        """
        begin = self._clock()
        waited_before_s = self._page_locked.waited_s
        self.finish()
        if wait:
            # the end of an attempt, perhaps with seconds left: locking takes as long as the slower copy
            self._page_locked.stop()
        snapshot = self._snapshot(state)
        if not self._background:
            self._write(snapshot, retain)
        else:
            arguments = snapshot, retain, wait
            # not a daemon: Python waits for it at exit, and the write is complete
            self._thread = threading.Thread(target=self._write_in_background, args=arguments, name="checkpoint")
            self._thread.start()
            if wait:
                self.finish()
        self.stall_s = self._clock() - begin - (self._page_locked.waited_s - waited_before_s)

    def finish(self) -> None:
        """Wait for the write in flight.

        Raises:
            CheckpointError: the write failed, and checkpoint.on_error doesn't tolerate that.
            SupersededError: a later attempt owns the run.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def wait(self, seconds: float) -> None:
        """Wait for the write in flight, but no longer than ``seconds``; `finish` raises its error."""
        if self._thread is not None:
            self._thread.join(seconds)

    def finish_within(self, seconds: float) -> None:
        """Wait for the write in flight, but no longer than ``seconds``; `finish` raises its error."""
        self._page_locked.stop()
        if self.busy:
            log.warning("a checkpoint is being written: waiting up to %.0f s for it", seconds)
            self.wait(seconds)

    def retain_in_background(self, intact: int) -> None:
        """Remove the checkpoints that an earlier attempt had no time to remove.

        Args:
            intact: the step of the checkpoint that was just verified.
        """
        # a daemon: a removal that is cut off is completed when the next attempt starts
        threading.Thread(target=self._retain, args=(intact,), name="retention", daemon=True).start()

    def _lock_after_first_step(self, state: LiveState, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer in self._awaiting_first_step:
            self._awaiting_first_step.remove(optimizer)
            # no message if the copy doesn't fit: the first save logs it
            if _fits(state.missing_bytes(self._page_locked), self._free_bytes()):
                self._page_locked.lock_ahead(state.page_locked_sizes(self._page_locked))

    def _snapshot(self, state: LiveState) -> Snapshot:
        """Copy the state, or only refer to it if training waits for the write."""
        if self._background and self._buffers is None:
            self._background = self._prepare(state)
        self._began_at = self._clock()
        return self._copied(state) if self._background else state.capture(copied=False)

    def _prepare(self, state: LiveState) -> bool:
        """Finish locking before the first copy, and return whether the copy fits into the available memory."""
        for hook in self._hooks:
            hook.remove()
        self._page_locked.wait_until_locked()
        missing_bytes = state.missing_bytes(self._page_locked)
        free_bytes = self._free_bytes()
        if free_bytes is not None and not _fits(missing_bytes, free_bytes):
            log.warning(
                "saving in the background would take %.2f GB of host memory, and %.2f GB are free: training waits for "
                "each save instead. Give the job more memory, or set checkpoint.asynchronous=false",
                missing_bytes / 1e9,
                free_bytes / 1e9,
            )
            self._page_locked.release()
            return False
        total_bytes = missing_bytes + self._page_locked.locked_bytes
        if total_bytes >= LOGGED_FROM_BYTES:
            log.info("saving in the background takes %.1f GB of host memory", total_bytes / 1e9)
        self._page_locked.wait_until_locked(state.page_locked_sizes(self._page_locked))
        return True

    def _copied(self, state: LiveState) -> Snapshot:
        waited_before_s = self._page_locked.waited_s
        self._buffers = state.capture(self._buffers, page_locked=self._page_locked)
        # a later save has these buffers: its duration is without the locking, or a stop might refuse a save that fits
        self._began_at += self._page_locked.waited_s - waited_before_s
        return self._buffers

    def _write(self, snapshot: Snapshot, retain: bool) -> None:
        if self._is_rank_zero and self._is_first:
            self._is_first = False
            self._warn_of_shortage(snapshot)
        try:
            path = self._writer.write(snapshot)
            # before any older one is removed: only reading the checkpoint back shows whether the disk kept the bytes
            if self._policy.verify == "after_save" and path is not None and (problem := find_damage(path)):
                raise CheckpointDamagedError(f"{path} was just written and is not intact: {problem}; check the disk")
        finally:
            self._longest_s = max(self._longest_s, self._clock() - self._began_at)
        if retain:
            self._retention.apply(snapshot.step)

    def _warn_of_shortage(self, snapshot: Snapshot) -> None:
        size = self._writer.size_of(snapshot)
        if size and (problem := describe_shortage(self._directory, snapshot.step, size, self._policy)):
            log.warning("%s", problem)

    def _write_in_background(self, snapshot: Snapshot, retain: bool, awaited: bool) -> None:
        _yield_to_training()
        try:
            self._write(snapshot, retain)
        except Exception as error:
            if not awaited and self._policy.on_error == "warn" and not isinstance(error, SupersededError):
                log.warning("training continues, and saves again when the next save is due: %s", error)
                return
            self._error = error
            if not awaited:
                self._stop.fail(error)

    def _retain(self, intact: int) -> None:
        _yield_to_training()
        try:
            self._retention.apply(intact)
        except SupersededError:
            return  # the later attempt removes them


def _fits(needed: int, free: int | None) -> bool:
    return free is None or free >= MEMORY_MARGIN * needed


def _yield_to_training() -> None:
    # a process with a higher niceness keeps it: lowering it requires a privilege
    niceness = max(WRITER_NICENESS, os.getpriority(os.PRIO_PROCESS, 0))
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


PRIOR_S = 24 * 3600.0
"""Assumed mean time between failures before any was observed: one failure a day."""


def mean_time_between_failures_s(attempts: Sequence[Attempt], now: float) -> float:
    """Estimate the mean time between failures from the run's ledger, in seconds; the prior counts as one failure.

    Args:
        attempts: of the run, the current one included.
        now: epoch seconds.
    """
    observed = sum((entry.end_time or now) - entry.start_time for entry in attempts if entry.start_time is not None)
    failures = sum(entry.reason is not None and not entry.reason.meaning.orderly for entry in attempts)
    return (max(observed, 0.0) + PRIOR_S) / (failures + 1)


def best_interval_s(save_cost_s: float, mean_time_between_failures: float) -> float:
    """Return the seconds of training between two saves that lose the least time.

    Young's sqrt(2 d M) (CACM 17(9), 1974) with the higher-order terms of Daly (FGCS 22(3), 2006), d the time that a
    save takes from training and M the mean time between failures. The time of a restart shifts the loss, but not its
    minimum.
    """
    d, m = save_cost_s, mean_time_between_failures
    if d <= 0:
        return 1.0
    if d >= 2 * m:
        return m
    ratio = d / (2 * m)
    return max(1.0, math.sqrt(2 * d * m) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - d)


def auto_interval_s(stall_s: float, save_duration_s: float, attempts: Sequence[Attempt], now: float) -> float:
    """Choose, and log, the seconds of training until the next save.

    Args:
        stall_s: seconds for which a save stops training.
        save_duration_s: seconds from the beginning of a save until it is durable.
        attempts: of the run, including the current one.
        now: epoch seconds.
    """
    mtbf_s = mean_time_between_failures_s(attempts, now)
    # one save at a time: the next one isn't due before this one is written
    interval_s = max(best_interval_s(stall_s, mtbf_s), save_duration_s)
    log.info(
        "a save every %.0f s: it costs %.2f s, is written within %.1f s, and one failure in %.1f h is expected",
        interval_s,
        stall_s,
        save_duration_s,
        mtbf_s / 3600,
    )
    return interval_s

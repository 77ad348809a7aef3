"""Saving beside training: the copy is taken at once, the write goes on while the next steps run."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hpctrain.checkpoint.memory import available_memory_bytes
from hpctrain.checkpoint.state import Snapshot
from hpctrain.checkpoint.writer import CheckpointWriter
from hpctrain.errors import CheckpointDamagedError, SupersededError
from hpctrain.run.checkpoints import verify

log = logging.getLogger("hpctrain.checkpoint")

WRITER_NICENESS = 10
"""The writing thread yields the cores to training (setpriority(2), per thread on Linux)."""
MEMORY_MARGIN = 1.1
"""Of what the copy takes must be free before it is made."""
WORTH_TELLING_BYTES = 100_000_000


class Source(Protocol):
    """What is saved."""

    def held_bytes(self) -> int:
        """Host memory that a copy takes."""
        ...

    def capture(self, into: Snapshot | None, *, copied: bool) -> Snapshot:
        """What a checkpoint holds: copied, into an earlier snapshot's buffers where it is given; or as it lies."""
        ...


class CheckpointSaver:
    """Saves on rank zero, in the background or not; one save is in flight at most.

    Beside training, the copy goes into buffers that are kept from save to save, so that it runs at the speed of memory.
    They take as much host memory as weights, averages and optimizer together. That is said and compared with what is
    free before the first one is made; where it doesn't fit, training stands still for each save instead.

    Args:
        writer: writes, publishes and removes.
        background: write beside training.
        verify_after: read every checkpoint back once it is published.
        on_failure: called in the writing thread with an error that nobody waits for; whether that settles it. If not,
            the next `save` or `finish` raises it.
        clock: monotonic seconds.
        free_bytes: memory that this process may still take; None: unknown.

    Attributes:
        stall_s: seconds that the last save held training up.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        *,
        background: bool,
        verify_after: bool,
        on_failure: Callable[[Exception], bool],
        clock: Callable[[], float] = time.monotonic,
        free_bytes: Callable[[], int | None] = available_memory_bytes,
    ) -> None:
        self._writer, self._background, self._verify_after = writer, background, verify_after
        self._on_failure, self._clock, self._free_bytes = on_failure, clock, free_bytes
        self._kept: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._began_at = self._longest_s = self.stall_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether a write is in flight."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def takes_s(self) -> float:
        """Seconds until a save that began now would be durable, by the longest so far; the one in flight goes first."""
        if not self.busy:
            return self._longest_s
        spent_s = self._clock() - self._began_at
        longest_s = max(self._longest_s, spent_s)
        return longest_s - spent_s + longest_s

    def save(self, source: Source, *, wait: bool, retain: bool = True) -> None:
        """Copy, and write beside training or at once.

        Args:
            source: between two steps.
            wait: return only when it is published, or the error is known.
            retain: False leaves older checkpoints for later, for when the time left is short.

        Raises:
            CheckpointError: the copy, or the write that was waited for, failed; also that of an earlier save.
            SupersededError: a later attempt owns the run.
        """
        begin = self._clock()
        self.finish()
        self._began_at = self._clock()
        if self._background and self._kept is None:
            self._background = self._fits(source.held_bytes())
        if not self._background:
            self._write(source.capture(None, copied=False), retain)
        else:
            self._kept = source.capture(self._kept, copied=True)
            arguments = self._kept, retain, wait
            self._thread = threading.Thread(target=self._write_beside, args=arguments, name="checkpoint")
            self._thread.start()
            if wait:
                self.finish()
        self.stall_s = self._clock() - begin

    def finish(self) -> None:
        """Wait for the write in flight.

        Raises:
            CheckpointError: it failed, and that isn't settled.
            SupersededError: a later attempt owns the run.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def give_time(self, seconds: float) -> None:
        """Wait for the write in flight, but no longer than this; its error is left to `finish`."""
        if self._thread is not None and self.busy:
            log.warning("a checkpoint is being written: it gets up to %.0f s more", seconds)
            self._thread.join(seconds)

    def tidy(self, intact: int) -> None:
        """Remove beside training what an earlier attempt had no time to; nobody waits for it.

        Args:
            intact: the step of the checkpoint that was just verified.
        """
        threading.Thread(target=self._tidy, args=(intact,), name="tidy", daemon=True).start()

    def _fits(self, needed: int) -> bool:
        free = self._free_bytes()
        if free is not None and free < MEMORY_MARGIN * needed:
            log.warning(
                "saving beside training would keep %.2f GB of host memory, and %.2f GB are free: training stands still "
                "for each save instead. Give the job more memory, or set checkpoint.asynchronous=false",
                needed / 1e9,
                free / 1e9,
            )
            return False
        if needed >= WORTH_TELLING_BYTES:
            log.info("saving beside training keeps %.1f GB of host memory", needed / 1e9)
        return True

    def _write(self, snapshot: Snapshot, retain: bool) -> None:
        try:
            path = self._writer.write(snapshot, retain=False)
            if self._verify_after:
                check(path)
        finally:
            self._longest_s = max(self._longest_s, self._clock() - self._began_at)
        if retain:
            self._writer.retain(snapshot.state["step"])

    def _write_beside(self, snapshot: Snapshot, retain: bool, awaited: bool) -> None:
        _yield_to_training()
        try:
            self._write(snapshot, retain)
        except Exception as error:
            if awaited or not self._on_failure(error):
                self._error = error

    def _tidy(self, intact: int) -> None:
        _yield_to_training()
        try:
            self._writer.retain(intact)
        except SupersededError:
            return  # the later attempt tidies up


def _yield_to_training() -> None:
    # a job that is nicer already may stay so: going back takes a privilege
    niceness = max(WRITER_NICENESS, os.getpriority(os.PRIO_PROCESS, 0))
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def check(path: Path) -> None:
    """Read a checkpoint back.

    Raises:
        CheckpointDamagedError: what the disk gives is not what was written.
    """
    problem = verify(path)
    if problem:
        raise CheckpointDamagedError(f"{path} was just written and is not intact: {problem}; see to the disk")

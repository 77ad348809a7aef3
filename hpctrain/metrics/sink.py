"""The protocol of metric sinks, and the file to which two of them append."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from hpctrain.phrases import byte_size
from hpctrain.run.file_system import explain

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES = 16 * 2**20
"""Bytes to keep while the file can't be written, about a hundred thousand records; what exceeds them is dropped."""


class Sink(Protocol):
    """A destination for metrics, on rank zero only. No method is collective.

    Metric names: ``train/loss``, ``train/lr``, ``train/epoch``, ``eval/loss``, ``eval/accuracy``,
    ``throughput/samples_per_s``, and those of the task.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step. Steps never decrease within an attempt; one step may come in several calls."""
        ...

    def flush(self) -> None:
        """Make the records durable; called before a checkpoint is published, so that a resume misses no record."""
        ...

    def close(self) -> None:
        """Flush and release; nothing is logged afterwards."""
        ...


class RecordFile:
    """Appends whole records to a file, each in one write, without blocking while the file system fails.

    While it fails (full, read-only, unmounted), records wait in memory, up to 16 MiB or one that is larger, and follow
    in order as soon as a write succeeds; a record that was written in part is completed. The first failure, the first
    record that is dropped, and the recovery are logged as warnings.

    Args:
        path: an existing file; only this process writes it.

    Raises:
        OSError: the file can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending = b""
        self._failing = False
        self._dropping = False
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)

    @property
    def is_behind(self) -> bool:
        """Whether records wait in memory."""
        return bool(self._pending)

    def append(self, record: bytes) -> None:
        """Write one record, after any that wait in memory."""
        if not self._has_room(record):
            self._write_pending()
        if self._has_room(record):
            self._pending += record
        elif not self._dropping:
            logger.warning("%s: too many records wait in memory, so some are dropped", self._path)
            self._dropping = True
        self._write_pending()

    def _has_room(self, record: bytes) -> bool:
        return not self._pending or len(self._pending) + len(record) <= MAX_PENDING_BYTES

    def _write_pending(self) -> None:
        try:
            while self._pending:
                written = os.write(self._descriptor, self._pending)
                self._pending = self._pending[written:]
        except OSError as error:
            # not `retry`: waiting for the file system here would block training
            if not self._failing:
                why = explain(error, self._path)
                logger.warning("%s can't be written (%s): records wait in memory", self._path, why)
            self._failing = True
            return
        if self._failing:
            logger.warning("%s can be written again", self._path)
            self._failing = self._dropping = False

    def sync(self) -> None:
        """Make the records durable; a failure is a warning."""
        self.append(b"")
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            logger.warning("%s could not be made durable (%s)", self._path, explain(error, self._path))

    def close(self) -> None:
        """Sync and close; a failure is a warning."""
        self.sync()
        if self._pending:
            logger.warning("%s lacks its last %s: they couldn't be written", self._path, byte_size(len(self._pending)))
        try:
            os.close(self._descriptor)
        except OSError as error:  # NFS reports here what it couldn't store
            logger.warning("%s could not be made durable (%s)", self._path, explain(error, self._path))

"""A file that may refuse to be written for a while without anybody having to stop."""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES = 16 * 2**20
"""What is kept while the file can't be written; about a hundred thousand records. What comes then is lost."""


class PatientFile:
    """Appends whole records, each in one write, to a file that only this process writes.

    Where the file system refuses (full, read-only for a while, gone), records wait in memory, up to 16 MiB, and follow
    in order as soon as it can be; a half-written one is completed. One warning tells the beginning of it, one the end.

    Args:
        path: an existing file.

    Raises:
        OSError: it can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending = b""
        self._failing = False
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)

    def append(self, record: bytes) -> None:
        """Write one record, after those that wait."""
        if len(self._pending) + len(record) <= MAX_PENDING_BYTES:
            self._pending += record
        try:
            while self._pending:
                written = os.write(self._descriptor, self._pending)
                self._pending = self._pending[written:]
        except OSError as error:
            if not self._failing:
                logger.warning("%s can't be written (%s): records are kept and tried again", self._path, error.strerror)
            self._failing = True
            return
        if self._failing:
            logger.warning("%s is written again", self._path)
            self._failing = False

    def sync(self) -> None:
        """Make the records durable, as far as the file system lets us; a failure is a warning."""
        self.append(b"")
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            logger.warning("%s could not be made durable (%s)", self._path, error.strerror)

    def close(self) -> None:
        """Sync and close."""
        self.sync()
        os.close(self._descriptor)

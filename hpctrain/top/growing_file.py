"""Read what was appended to a file of JSON lines since the last read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.files import open_file

FIRST_BYTES = 32 * 2**10
"""Bytes at the end of the file that the first read returns: the file may be huge."""
OPEN_EVERY_S = 15.0
"""Seconds after which the file is opened although its size is the same: over NFS, only an open is sure to show what
another machine has appended."""
MOST_BYTES = 64 * 2**20
"""Most bytes that one read returns."""
_KEPT = 64


@dataclass(frozen=True, slots=True)
class Appended:
    """What a read found.

    Attributes:
        lines: complete ones, oldest first, without their line breaks.
        anew: whether the file was cut or replaced, so that all lines read before are void.
    """

    lines: tuple[bytes, ...] = ()
    anew: bool = False


NOTHING = Appended()


class GrowingFile:
    """A file of lines that other processes append to; it may appear later, be cut, replaced or removed.

    A line without a line break is returned once it is complete.

    Args:
        path: the file.
        first_bytes: of its end, with which the first read begins.
        clock: monotonic seconds.
    """

    def __init__(self, path: Path, first_bytes: int = FIRST_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._name = str(path)
        self._first_bytes = first_bytes
        self._clock = clock
        self._opened = float("-inf")
        self._seen: tuple[int, int, int] | None = None
        self._inode: int | None = None
        self._position = 0
        self._before = b""

    def read(self) -> Appended:
        """Read the lines that were completed since the last read.

        Raises:
            OSError: the file exists and can't be read.
        """
        try:
            # a stat costs a tenth of an open, and most files of many runs are as they were
            found = os.stat(self._name)  # noqa: PTH116 - a third of the time of Path.stat
            seen = (found.st_ino, found.st_size, found.st_mtime_ns)
            if seen == self._seen and self._clock() - self._opened < OPEN_EVERY_S:
                return NOTHING
            appended = self._read()
        except FileNotFoundError:
            appended = Appended(anew=self._position > 0)
            self._forget()
            return appended
        self._seen = seen
        return appended

    def _read(self) -> Appended:
        with open_file(self.path) as file:
            self._opened = self._clock()
            found = os.fstat(file.fileno())
            anew = self._inode is not None and not self._continues(file.fileno(), found)
            if anew or self._inode is None:
                self._forget()
                self._inode = found.st_ino
                self._position = max(0, found.st_size - self._first_bytes)
                skip = self._position > 0
            else:
                skip = False
            left = max(0, found.st_size - self._position)
            data = os.pread(file.fileno(), min(left, MOST_BYTES), self._position)
        # what follows is read at the next look; a line that is longer is skipped
        end = data.rfind(b"\n") + 1 or (len(data) if left > MOST_BYTES else 0)
        if skip:  # it begins within a line
            start = data.find(b"\n") + 1
            lines = data[start:end].splitlines()
        else:
            lines = data[:end].splitlines()
        self._position += end
        self._before = (self._before + data[:end])[-_KEPT:]
        return Appended(tuple(lines), anew)

    def _continues(self, descriptor: int, found: os.stat_result) -> bool:
        """Whether the file is the one that was read, and begins as it did: a resume writes a new one."""
        if found.st_ino != self._inode or found.st_size < self._position:
            return False
        start = self._position - len(self._before)
        return os.pread(descriptor, len(self._before), start) == self._before

    def _forget(self) -> None:
        self._inode = None
        self._seen = None
        self._position = 0
        self._before = b""

"""Follow a file that another process appends to: what is new since the last read, and whether the file was replaced."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hpctrain.files import open_file

CHUNK_BYTES = 2**20
"""Most bytes that one read of a log returns."""
LINES_BYTES = 64 * 2**20
"""Most bytes that one read of lines returns."""
LAST_CHUNKS = 64
"""Chunks at the end of a log that are searched for its last lines."""
_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class Appended:
    """The result of one read.

    Attributes:
        data: what was appended.
        anew: whether the file was cut, replaced or removed, so that everything read before is void.
    """

    data: bytes = b""
    anew: bool = False

    @property
    def lines(self) -> list[bytes]:
        """The lines of the data, without their line breaks."""
        return self.data.removesuffix(b"\n").split(b"\n") if self.data else []


NOTHING = Appended()


class GrowingFile:
    """A file that other processes append to; it may appear later, be cut, replaced or removed.

    Args:
        path: the file.
        start: the byte at which the first read begins; negative, as in a slice, for the first line that begins so many
            bytes before the end of the file.
        opener: opens the file for reading.

    Attributes:
        position: the byte at which the next read begins. Given as `start`, it continues in another process.
    """

    def __init__(self, path: Path, start: int = 0, *, opener: Callable[[Path], BinaryIO] = open_file) -> None:
        self.path = path
        self.position = max(0, start)
        self._start = start
        self._opener = opener
        self._inode: int | None = None
        self._before = b""

    def read(self) -> Appended:
        """Read what was appended since the last read, at most `CHUNK_BYTES`; the last line may be incomplete.

        Raises:
            OSError: the file exists and can't be read.
        """
        return self._appended(CHUNK_BYTES, whole_lines=False)

    def read_lines(self) -> Appended:
        """Read the lines that were completed since the last read, at most `LINES_BYTES`.

        A longer line is returned in pieces.

        Raises:
            OSError: as `read`.
        """
        return self._appended(LINES_BYTES, whole_lines=True)

    def _appended(self, max_bytes: int, *, whole_lines: bool) -> Appended:
        try:
            with self._opener(self.path) as file:
                return self._read(file.fileno(), max_bytes, whole_lines=whole_lines)
        except FileNotFoundError:
            appended = Appended(anew=self._inode is not None and self.position > 0)
            self._forget()
            return appended

    def _read(self, descriptor: int, max_bytes: int, *, whole_lines: bool) -> Appended:
        status = os.fstat(descriptor)
        anew = self._inode is not None and not self._continues(descriptor, status)
        if anew:
            self._forget()
        skips = self._inode is None and self._start < 0 and status.st_size > -self._start
        if self._inode is None:
            self._inode = status.st_ino
            if self._start < 0:
                self.position = max(0, status.st_size + self._start)
        if self.position > status.st_size:  # cut since the read at which another process stopped
            anew = True
            self.position = 0
        unread = status.st_size - self.position
        data = os.pread(descriptor, min(unread, max_bytes), self.position)
        if whole_lines:
            # what follows is read next time
            data = data[: data.rfind(b"\n") + 1 or (len(data) if unread > max_bytes else 0)]
        self.position += len(data)
        self._before = (self._before + data)[-_REMEMBERED:]
        return Appended(data.partition(b"\n")[2] if skips else data, anew)

    def _continues(self, descriptor: int, status: os.stat_result) -> bool:
        """Whether the file is the one that was read; one that replaces it may get its inode's number."""
        if status.st_ino != self._inode or status.st_size < self.position:
            return False
        return os.pread(descriptor, len(self._before), self.position - len(self._before)) == self._before

    def _forget(self) -> None:
        self._start = min(0, self._start)
        self.position = 0
        self._inode = None
        self._before = b""


def start_of_last_lines(path: Path, lines: int) -> int:
    """The offset, in bytes, at which the last ``lines`` lines of a file begin."""
    with open_file(path) as file:
        start = file.seek(0, os.SEEK_END)
        if not lines:
            return start
        unread = max(0, start - 1)  # without the line break of the last line
        # in chunks, since a log may be huge; and not all of it, which may have no line break
        for _ in range(LAST_CHUNKS):
            begin = max(0, unread - CHUNK_BYTES)
            file.seek(begin)
            data = file.read(unread - begin)
            place = len(data)
            while (place := data.rfind(b"\n", 0, place)) >= 0:
                lines -= 1
                if not lines:
                    return begin + place + 1
            unread = begin
        return unread

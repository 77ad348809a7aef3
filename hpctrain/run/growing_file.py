"""Follow a file that another process appends to: what is new since the last read, and whether the file was replaced."""

from __future__ import annotations

import os
import time
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
        trusted_s: seconds for which the file isn't opened if its size and time are those of the last read. Over NFS,
            only an open is sure to show what another machine has appended, but a stat costs a tenth of one.
        opener: opens the file for reading.
        clock: monotonic seconds.

    Attributes:
        position: the byte at which the next read begins. Given as `start`, it continues in another process.
    """

    def __init__(
        self,
        path: Path,
        start: int = 0,
        *,
        trusted_s: float = 0.0,
        opener: Callable[[Path], BinaryIO] = open_file,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.position = max(0, start)
        self._name = str(path)
        self._start = start
        self._trusted_s = trusted_s
        self._opener = opener
        self._clock = clock
        self._opened = float("-inf")
        self._last_state: tuple[int, int, int] | None = None
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
            status = os.stat(self._name) if self._trusted_s else None  # noqa: PTH116 - a third of the time of Path.stat
            state = None if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)
            if state is not None and state == self._last_state and self._clock() - self._opened < self._trusted_s:
                return NOTHING
            with self._opener(self.path) as file:
                self._opened = self._clock()
                appended, is_rest = self._read(file.fileno(), max_bytes, whole_lines=whole_lines)
        except FileNotFoundError:
            appended = Appended(anew=self._inode is not None and self.position > 0)
            self._forget()
            return appended
        self._last_state = state if is_rest else None
        return appended

    def _read(self, descriptor: int, max_bytes: int, *, whole_lines: bool) -> tuple[Appended, bool]:
        """Return what was appended, and whether no more of it is left."""
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
        return Appended(data.partition(b"\n")[2] if skips else data, anew), unread <= max_bytes

    def _continues(self, descriptor: int, status: os.stat_result) -> bool:
        """Whether the file is the one that was read; one that replaces it may get its inode's number."""
        if status.st_ino != self._inode or status.st_size < self.position:
            return False
        return os.pread(descriptor, len(self._before), self.position - len(self._before)) == self._before

    def _forget(self) -> None:
        self._start = min(0, self._start)
        self.position = 0
        self._inode = None
        self._last_state = None
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

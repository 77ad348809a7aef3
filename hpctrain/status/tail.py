"""A file that somebody else writes, read as it grows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

CHUNK_BYTES = 2**20


class Tail:
    """Gives what was appended since the last time; the file may come later, be cut, or be replaced.

    Args:
        path: the file.
        last_lines: begin with so many lines of what is there at first; None begins at its beginning.
    """

    def __init__(self, path: Path, last_lines: int | None = None) -> None:
        self.path = path
        self._last_lines = last_lines
        self._file: BinaryIO | None = None

    def read(self) -> bytes:
        """What is new, at most 1 MiB; empty where there is nothing, or no file.

        Raises:
            OSError: the file is there and can't be read.
        """
        try:
            on_disk = self.path.stat()
        except FileNotFoundError:
            on_disk = None
        if self._file is None:
            return b"" if on_disk is None else self._open()
        if data := self._file.read(CHUNK_BYTES):
            return data
        here = os.fstat(self._file.fileno())
        if on_disk is not None and (on_disk.st_dev, on_disk.st_ino) != (here.st_dev, here.st_ino):
            self.close()
            return self._open()
        if here.st_size < self._file.tell():
            self._file.seek(0)
            return self._file.read(CHUNK_BYTES)
        return b""

    def close(self) -> None:
        """Release the file; the next read begins at its beginning."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> bytes:
        self._file = self.path.open("rb", buffering=0)
        if self._last_lines is not None:
            self._file.seek(_start_of_last_lines(self._file, self._last_lines))
            self._last_lines = None
        return self._file.read(CHUNK_BYTES)


def _start_of_last_lines(file: BinaryIO, lines: int) -> int:
    """The offset at which the last ``lines`` lines begin."""
    end = position = file.seek(0, os.SEEK_END)
    wanted = lines + 1  # newlines to find, the one that ends the file among them
    while position > 0:
        start = max(0, position - CHUNK_BYTES)
        file.seek(start)
        block = file.read(position - start)
        if position == end and not block.endswith(b"\n"):
            wanted -= 1
        found = len(block)
        while wanted and (found := block.rfind(b"\n", 0, found)) >= 0:
            wanted -= 1
        if not wanted:
            return start + found + 1
        position = start
    return 0

"""A file whose checksum is computed while it is written."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import xxhash

from hpctrain.files import errors_naming

_BLOCK_BYTES = 4 << 20
UNCOPIED_FROM_BYTES = 1 << 20
"""Bytes that are worth a write of their own, and of what comes before them, without a copy."""


class ChecksummedFile:
    """A new file, written once from start to end, bypassing the page cache if the file system supports that.

    Direct I/O (open(2), O_DIRECT) saves the memory and most of the processor time that a buffered write of gigabytes
    takes from training. `close` raises the error of an earlier write.

    Args:
        path: must not exist.

    Raises:
        OSError: it can't be created.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._descriptor = os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)
            self._descriptor = os.open(path, flags, 0o666)
        self._path = path
        self.bytes = 0
        # against damage, not forgery: a cryptographic digest of every byte would take several times longer
        self._digest = xxhash.xxh3_128()
        # page-aligned, as direct I/O requires, and shared, so that forking a DataLoader worker can't copy it
        self._block = memoryview(mmap.mmap(-1, _BLOCK_BYTES))
        # NumPy releases the GIL while it copies, so training doesn't wait
        self._bytes_of_block = np.frombuffer(self._block, np.uint8)
        self._filled = 0
        # kept until `close`: torch's zip writer, which calls `write`, would hide it behind its own error
        self._error: OSError | None = None

    @property
    def checksum(self) -> str:
        """XXH3 (128 bits) of the bytes written so far, in hexadecimal."""
        return self._digest.hexdigest()

    def write(self, data: bytes | memoryview) -> int:
        """Write all of ``data``, and return its length in bytes."""
        rest = memoryview(data).cast("B")
        count = len(rest)
        self.bytes += count
        while len(rest) and self._error is None:
            if self._filled % mmap.PAGESIZE == 0 and len(rest) >= UNCOPIED_FROM_BYTES and _is_aligned(rest):
                rest = self._write_uncopied(rest)
                continue
            piece = rest[: _BLOCK_BYTES - self._filled]
            self._digest.update(piece)
            self._bytes_of_block[self._filled : self._filled + len(piece)] = np.frombuffer(piece, np.uint8)
            self._filled += len(piece)
            rest = rest[len(piece) :]
            if self._filled == _BLOCK_BYTES:
                self._write_block()
        return count

    def flush(self) -> None:
        """Do nothing; torch.save calls it."""

    def close(self) -> None:
        """Write the rest, make the file durable, and close it.

        Raises:
            OSError: this write or an earlier one failed; the file is closed all the same.
        """
        with errors_naming(self._path):
            try:
                if self._filled and self._error is None:
                    # direct I/O takes whole pages only
                    self._use_page_cache()
                    self._write_block()
                if self._error is not None:
                    raise self._error
                os.fsync(self._descriptor)
            finally:
                os.close(self._descriptor)

    def _write_uncopied(self, data: memoryview) -> memoryview:
        """Write whole pages from where they are, and return the rest; the file ends at a page."""
        if self._filled:
            self._write_block()
        count = len(data) // mmap.PAGESIZE * mmap.PAGESIZE
        for begin in range(0, count, _BLOCK_BYTES):
            piece = data[begin : min(begin + _BLOCK_BYTES, count)]
            self._digest.update(piece)
            self._write_all(piece)
        return data[count:]

    def _write_block(self) -> None:
        self._write_all(self._block[: self._filled])
        self._filled = 0

    def _write_all(self, data: memoryview) -> None:
        try:
            while len(data) and self._error is None:
                data = data[self._write_some(data) :]
        except OSError as error:
            self._error = error

    def _write_some(self, data: memoryview) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            # some file systems accept O_DIRECT and then reject the write; a short write leaves the offset unaligned
            if error.errno != errno.EINVAL or not self._use_page_cache():
                raise
            return os.write(self._descriptor, data)

    def _use_page_cache(self) -> bool:
        """Leave direct I/O, and return whether it was in use."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return bool(flags & os.O_DIRECT)


def _is_aligned(data: memoryview) -> bool:
    """Whether direct I/O can write the data from where they are."""
    return int(np.frombuffer(data, np.uint8).ctypes.data) % mmap.PAGESIZE == 0

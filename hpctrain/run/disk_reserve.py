"""Disk space that an attempt reserves when it begins, so that its end can be recorded on a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

FILE_NAME = "room"
BYTES = 256 * 2**10
FULL = (errno.ENOSPC, errno.EDQUOT)


def reserve(claim: Path) -> None:
    """Reserve the space; do nothing if the disk is full already."""
    with contextlib.suppress(OSError):
        # random, since some file systems store no zeros
        (claim / FILE_NAME).write_bytes(os.urandom(BYTES))


def release(claim: Path) -> None:
    """Release the space."""
    with contextlib.suppress(OSError):
        (claim / FILE_NAME).unlink(missing_ok=True)


def write_with_reserve(claim: Path, write: Callable[[], None]) -> None:
    """Write; on a full disk, release the reserved space and write again.

    Args:
        claim: of the attempt.
        write: may be called twice.

    Raises:
        OSError: it still can't be written.
    """
    try:
        write()
    except OSError as error:
        if error.errno not in FULL:
            raise
        release(claim)
        write()

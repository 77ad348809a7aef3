"""A little room on the disk, kept from an attempt's beginning on, for its last words on a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

FILE_NAME = "room"
BYTES = 256 * 2**10
FULL = (errno.ENOSPC, errno.EDQUOT)

Result = TypeVar("Result")


def keep_room(claim: Path) -> None:
    """Take the room; where the disk is full already, there is none."""
    with contextlib.suppress(OSError):
        # no zeros: some file systems store none
        (claim / FILE_NAME).write_bytes(os.urandom(BYTES))


def give_room(claim: Path) -> None:
    """Give the room back."""
    with contextlib.suppress(OSError):
        (claim / FILE_NAME).unlink(missing_ok=True)


def with_room(claim: Path, write: Callable[[], Result]) -> Result:
    """Write; where the disk is full, write again in the room that was kept.

    Args:
        claim: of the attempt.
        write: may be called twice.

    Raises:
        OSError: it can't be written all the same.
    """
    try:
        return write()
    except OSError as error:
        if error.errno not in FULL:
            raise
        give_room(claim)
        return write()

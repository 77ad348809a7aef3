"""Disk space and files that an attempt reserves when it begins, so that its end can be recorded on a full disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hpctrain.run.file_system import FULL

FILE_NAME = "room"
BYTES = 256 * 2**10
FILES = 4
"""Of the launcher: its marker of the end, a record that doesn't exist yet, a temporary file, and one to spare."""
RANK_BYTES = 16 * 2**10
"""Of a rank's exit record; with a long traceback, it takes those of the launcher as well."""


def reserve(claim: Path) -> None:
    """Reserve the space, and the files that the launcher needs at the end.

    Raises:
        OSError: the disk is full already; nothing is reserved.
    """
    try:
        # random, since some file systems store no zeros
        (claim / FILE_NAME).write_bytes(os.urandom(BYTES))
        for number in range(1, FILES):
            (claim / f"{FILE_NAME}_{number}").touch()
    except OSError as error:
        if error.errno in FULL:
            release(claim)
            raise


def reserve_for_rank(claim: Path, rank: int) -> None:
    """Reserve the file of a rank's exit record, if the disk isn't full."""
    with contextlib.suppress(OSError):
        _of_rank(claim, rank).write_bytes(os.urandom(RANK_BYTES))


def release(claim: Path) -> None:
    """Release the space and the files."""
    with contextlib.suppress(OSError):
        for path in claim.glob(f"{FILE_NAME}*"):
            path.unlink(missing_ok=True)


def release_of_rank(claim: Path, rank: int) -> None:
    """Release the file of a rank that has written its exit record."""
    with contextlib.suppress(OSError):
        _of_rank(claim, rank).unlink(missing_ok=True)


def write_with_reserve(claim: Path, write: Callable[[], None], *, rank: int | None = None) -> None:
    """Write; on a full disk, release what is reserved and write again.

    Args:
        claim: of the attempt.
        write: may be called several times.
        rank: whose own reserve is released first.

    Raises:
        OSError: it still can't be written.
    """
    releases = [] if rank is None else [partial(release_of_rank, claim, rank)]
    for release_more in (*releases, partial(release, claim)):
        try:
            return write()
        except OSError as error:
            if error.errno not in FULL:
                raise
        release_more()
    return write()


def _of_rank(claim: Path, rank: int) -> Path:
    return claim / f"{FILE_NAME}_of_rank_{rank}"

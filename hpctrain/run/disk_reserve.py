"""Disk space and files that an attempt reserves when it begins, so that its end can be recorded on a full disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from hpctrain.run.file_system import FULL

FILE_NAME = "room"
BYTES = 256 * 2**10
"""Size of the file that the launcher and the ranks share: a traceback may be long."""
SMALL_BYTES = 16 * 2**10
"""Size of each other file."""
LAUNCHER_FILE_NAMES = tuple(f"{FILE_NAME}_{number}" for number in (1, 2, 3))
"""For the marker of the end, a record that doesn't exist yet, and a temporary file."""


def reserve(claim: Path) -> None:
    """Reserve the space and the files that the launcher needs at the end, and the space for a traceback if it fits.

    Raises:
        OSError: the disk is full already; nothing is reserved.
    """
    try:
        for name in LAUNCHER_FILE_NAMES:
            # random, since some file systems store no zeros
            (claim / name).write_bytes(os.urandom(SMALL_BYTES))
    except OSError as error:
        if error.errno in FULL:
            release(claim)
            raise
    try:
        (claim / FILE_NAME).write_bytes(os.urandom(BYTES))
    except OSError:
        with contextlib.suppress(OSError):
            (claim / FILE_NAME).unlink(missing_ok=True)  # a part of it would leave nothing for the run itself


def reserve_for_rank(claim: Path, rank: int) -> None:
    """Reserve the file of a rank's exit record, if the disk isn't full."""
    with contextlib.suppress(OSError):
        _of_rank(claim, rank).write_bytes(os.urandom(SMALL_BYTES))


def release(claim: Path) -> None:
    """Release what is left, once the end is recorded."""
    with contextlib.suppress(OSError):
        for path in claim.glob(f"{FILE_NAME}*"):
            path.unlink(missing_ok=True)


def release_of_rank(claim: Path, rank: int) -> None:
    """Release the file of a rank that has written its exit record."""
    with contextlib.suppress(OSError):
        _of_rank(claim, rank).unlink(missing_ok=True)


def write_with_reserve(claim: Path, write: Callable[[], None], *, rank: int | None = None) -> None:
    """Write; while the disk is full, release one reserved file after the other and write again.

    Args:
        claim: of the attempt.
        write: may be called several times.
        rank: the one that writes, which doesn't release the launcher's files; None for the launcher.

    Raises:
        OSError: it still can't be written.
    """
    files = [claim / name for name in (FILE_NAME, *LAUNCHER_FILE_NAMES)]
    if rank is not None:
        files = [_of_rank(claim, rank), claim / FILE_NAME]
    for file in files:
        if not file.exists():
            continue
        try:
            return write()
        except OSError as error:
            if error.errno not in FULL:
                raise
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
    return write()


def _of_rank(claim: Path, rank: int) -> Path:
    return claim / f"{FILE_NAME}_of_rank_{rank}"

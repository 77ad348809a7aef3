"""A folder in which the ranks of one machine meet, and which no other user can enter."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hpctrain.errors import RendezvousError

FILE_NAME = "store"


def lockable_folder() -> str | None:
    """The system's folder for temporary files, or /dev/shm if files can't be locked there; None if neither can."""
    # torch's FileStore calls flock, which is slow or missing on a network file system
    for folder in (tempfile.gettempdir(), "/dev/shm"):
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return folder
    return None


@contextlib.contextmanager
def private_folder(path: Path) -> Iterator[int]:
    """Make the folder with a file in it, and remove both at the end; ranks that have opened the file can still use it.

    Args:
        path: the folder.

    Yields:
        A descriptor of the file, which stays open.

    Raises:
        RendezvousError: the folder exists, and belongs to another user or is open to others.
        OSError: the file system's error.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        # left by an earlier start, which was killed while its ranks met, and whose folder has the same name
        _require_own(path, path.lstat())
        shutil.rmtree(path)
        path.mkdir(mode=0o700)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        file = os.open(FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        # the kernel unlocks it when this process dies: a folder that isn't locked was left behind
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield file
    finally:
        with contextlib.suppress(OSError):
            os.unlink(FILE_NAME, dir_fd=folder)
            # a later start may have replaced the folder
            if path.lstat().st_ino == os.fstat(folder).st_ino:
                path.rmdir()
        os.close(folder)


def open_private_file(path: Path) -> int | None:
    """Open the file in a `private_folder` of another process.

    Args:
        path: the folder.

    Returns:
        A descriptor of the file; None if the process hasn't made the folder yet, or has died.

    Raises:
        RendezvousError: the folder isn't private to this user.
        OSError: the file system's error.
    """
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        _require_own(path, os.fstat(folder))
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None  # of a process that has died
        return os.open(FILE_NAME, os.O_RDWR | os.O_NOFOLLOW, dir_fd=folder)
    except FileNotFoundError:
        return None
    finally:
        os.close(folder)


def _require_own(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise RendezvousError(
            f"{path}: expected a folder of user {os.geteuid()}, found one of user {status.st_uid}; ask that user to "
            "remove it, or set TMPDIR to another folder of this machine"
        )
    if status.st_mode & 0o077:
        raise RendezvousError(
            f"{path}: expected mode 700, found {status.st_mode & 0o777:o}, which lets other users in; remove it"
        )

"""Folders for temporary files, which only this user may enter, and which a later process removes if this one is killed.

Not in `run.process`: a rank imports that before it blocks the stop signals, and `tempfile` and `shutil` take long.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hpctrain.run.process import boot_id

_KINDS = "(session|ranks|wandb|fit-batch)-[a-z0-9_]{8}|[0-9a-f]{16}"  # the latter is a `private_folder`
LOCKED_AFTER_S = 10.0
"""Age in seconds from which a folder without a lock counts as left behind: a process locks it right after making it."""


def first_part() -> str:
    """The first part of a folder's name, with this machine's id, since others may see the folder, but not its lock.

    NFS keeps locks of folders on the machine: the kernel's ``nfs_dir_operations`` has no ``flock``.
    """
    return f"hpctrain-{boot_id()[:8]}-"


@contextlib.contextmanager
def temporary_folder(purpose: str, place: str | None = None) -> Iterator[Path]:
    """Make a folder that only this user can enter, and remove it at the end.

    Args:
        purpose: `session`, `ranks`, `wandb` or `fit-batch`, for its name.
        place: the folder in which it is made; None for the system's.

    Raises:
        OSError: it can't be made.
    """
    place = place or tempfile.gettempdir()
    remove_abandoned(place)
    path = Path(tempfile.mkdtemp(prefix=f"{first_part()}{purpose}-", dir=place))
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # without a lock, only `remove_abandoned` is in doubt, and passes over it
            # the kernel unlocks it when this process dies
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(folder)


def remove_abandoned(place: str) -> None:
    """Remove this user's temporary folders of hpctrain whose process was killed on this machine."""
    name = re.compile(f"{first_part()}({_KINDS})")
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if name.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_unlocked(entry.path)


def _remove_unlocked(path: str) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        state = os.fstat(folder)
        if state.st_uid == os.geteuid() and time.time() - state.st_mtime > LOCKED_AFTER_S:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(state, Path(path).lstat()):
                # else a later start has replaced it by one of the same name
                shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(folder)

"""Shared memory that loading processes left on a node when they were killed."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PROC = Path("/proc")
OF_PYTORCH = re.compile(r"torch_(\d+)_\d+_\d+")
"""The names that PyTorch gives, with the maker's process number (ATen/MapAllocator.cpp, NewProcessWideShmHandle)."""
ON_ITS_WAY_S = 60.0
"""A file that is younger may be on its way to a process that has yet to open it."""
IN_A_CONTAINER_S = 3600.0
"""The same where the node may have processes that this one can't see: it may wait in a queue for an evaluation."""
HOST = "pid:[4026531836]"
"""The host's own process namespace, of any kernel (PROC_PID_INIT_INO)."""

log = logging.getLogger("hpctrain.data")


def clear_left_behind(folder: Path = SHARED_MEMORY, proc: Path = PROC) -> list[str]:
    """Remove this user's shared memory whose maker is dead and that no process has open.

    A loading process makes a file, maps it and removes its name at once; killed in between, it leaves the file for as
    long as the node is up, and a job that loses many processes in time fills the node's memory.

    Where something can't be looked at or removed it stays: no run is worth it.

    Args:
        folder: where POSIX shared memory lies.
        proc: where proc(5) is mounted, if it is.

    Returns:
        The names of the files that are gone.
    """
    if sys.platform != "linux" or not folder.is_dir():
        return []
    cleared: list[str] = []
    with suppress(OSError):
        age_s = ON_ITS_WAY_S if str((proc / "self/ns/pid").readlink()) == HOST else IN_A_CONTAINER_S
        paths = [path for path in folder.iterdir() if _maker_is_dead(path.name, proc)]
        cleared += [path.name for path in paths if _remove(path, age_s)]
    if cleared:
        log.info("removed %d files of shared memory that killed processes left in %s", len(cleared), folder)
    return cleared


def _maker_is_dead(name: str, proc: Path) -> bool:
    match = OF_PYTORCH.fullmatch(name)
    return match is not None and not (proc / match[1]).exists()


def _remove(path: Path, age_s: float) -> bool:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False  # somebody else's, or gone
    try:
        found = os.fstat(file)
        if found.st_uid != os.getuid() or time.time() - found.st_mtime < age_s or _open_elsewhere(file):
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(file)


def _open_elsewhere(file: int) -> bool:
    """Whether any process has the file open or mapped, of other containers on this node too.

    The kernel grants a write lease only to the one who alone has a file open (fcntl(2), F_SETLEASE).
    """
    if sys.platform != "linux":
        return True
    try:
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # the default, SIGIO, would end this process
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return True
    return False

"""Room in the file system of the run directories."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from pathlib import Path

from hpctrain.doctor.finding import Finding, Severity
from hpctrain.phrases import scaled
from hpctrain.run.file_system import FULL, FileSystem, limit_met

FEW_FILES = 10_000
"""Files that must be left: a copy of the code alone may have thousands."""


def room_findings(folder: Path, needed_bytes: int, purpose: str, *, nodes: tuple[str, ...] = ()) -> list[Finding]:
    """Find out whether the file system has room, by reserving it for a moment where it can (fallocate(2)).

    Args:
        folder: in which files can be created.
        needed_bytes: to reserve.
        purpose: what they are for.
        nodes: from which this is tried; empty for the machine where the doctor was typed.
    """
    system = FileSystem.of(folder)
    shown = f"`{system.quota_command(folder)}` shows a quota, `df -h {folder}` the whole"
    remedy = f"remove what isn't needed, or set run_dir to another file system; {shown}"
    why = "a run ends with an error when it can't write a checkpoint"
    found = []
    if system.free_files is not None and system.free_files < FEW_FILES:
        problem = f"{folder}: only {system.free_files} more files can be created"
        found.append(
            Finding(
                check="room",
                severity=Severity.WARNING,  # some file systems make more when they are needed
                problem=problem,
                why=why,
                remedy=f"remove files; `df -i {folder}` counts them, `{system.quota_command(folder)}` those of a quota",
                nodes=nodes,
            )
        )
    # what isn't there isn't reserved: for a moment, that would take the rest from a run that is saving
    fits = system.free_bytes >= needed_bytes
    refusal = _reserve(folder, needed_bytes) if fits else None
    if refusal == errno.EDQUOT:
        problem = f"{folder}: your quota of bytes or of files has no room for {scaled(needed_bytes, 'B')}, {purpose}"
    elif refusal is not None and system.lacks_files:
        problem = f"{folder}: no file can be created, {purpose}: {system.describe_free()}"
    elif not fits or refusal is not None:
        needed = scaled(needed_bytes, "B")
        problem = f"{folder}: {scaled(system.free_bytes, 'B')} are free, but {needed} are needed, {purpose}"
    else:
        return found
    return [
        *found,
        Finding(check="room", severity=Severity.ERROR, problem=problem, why=why, remedy=remedy, nodes=nodes),
    ]


def _reserve(folder: Path, count: int) -> int | None:
    """Reserve space in a file that is removed at once; the error's number if the file system refuses for want of room.

    fallocate(2) of the C library: `os.posix_fallocate` would write to each block where it isn't supported.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".doctor-") as file:
            # a byte at least, since not every file system counts what is only reserved
            file.write(b"x")
            file.flush()
            failed = libc.fallocate(file.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(count))
            number = ctypes.get_errno() if failed else 0
            if not failed:
                os.fsync(file.fileno())
    except OSError as error:
        number = error.errno or 0
    return number if number in FULL else None


def full_finding(folder: Path, error: OSError) -> Finding:
    """The finding of a folder that couldn't be written because of an error of `file_system.FULL`."""
    return Finding(
        check="room",
        severity=Severity.ERROR,
        problem=f"{folder}: {limit_met(error, folder) or error.strerror}",
        why="a run can't write its records and checkpoints",
        remedy="remove what isn't needed, or set run_dir to another file system",
    )

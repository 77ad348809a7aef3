"""The folder that will hold the runs: what runs do with files there, tried, and room in its file system."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.doctor.finding import Finding, Severity
from hpctrain.files import append_json_line, describe_os_error, fsync_directory, write_atomic
from hpctrain.phrases import scaled
from hpctrain.run.file_system import FULL, FileSystem, limit_met, nearest_existing

NEEDED_BYTES = 64 * 10**6
"""Room that the records and logs of a run may take, without its checkpoints."""
FEW_FILES = 10_000
"""Files that must be left: a copy of the code alone may have thousands."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One operation that runs rely on.

    Attributes:
        name: of the operation.
        act: tries it in an empty folder; raises an OSError if it doesn't work.
        why: what depends on it.
        remedy: what to do without it.
        severity: of its absence.
    """

    name: str
    act: Callable[[Path], object]
    why: str
    remedy: str = "set run_dir to a folder on another file system"
    severity: Severity = Severity.ERROR


def _rename(folder: Path) -> None:
    write_atomic(folder / "renamed", "first")
    write_atomic(folder / "renamed", "second")
    if (folder / "renamed").read_text() != "second":
        raise OSError(errno.EIO, "a file that was renamed over another still has the old content")
    # a claim: of two that make the same folder, one has to fail
    (folder / "claim").mkdir()
    try:
        (folder / "claim").mkdir()
    except FileExistsError:
        return
    raise OSError(errno.EIO, "a folder can be made twice")


def _fsync(folder: Path) -> None:
    with (folder / "synced").open("wb") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
    fsync_directory(folder)


def _append(folder: Path) -> None:
    for number in range(2):
        append_json_line(folder / "lines.jsonl", {"number": number})
    if len((folder / "lines.jsonl").read_bytes().splitlines()) != 2:
        raise OSError(errno.EIO, "lines that were appended are missing")


def _lock(folder: Path) -> None:
    with (folder / "locked").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


TRIALS = (
    Trial("rename", _rename, "checkpoints and records appear by a rename, and a run is claimed by making a folder"),
    Trial("fsync", _fsync, "a checkpoint must be on the disk before an older one is removed"),
    Trial("append", _append, "attempts, metrics and logs are appended to files"),
    Trial(
        "locks",
        _lock,
        "parallel.init_method=file://PATH locks that file",
        "leave parallel.init_method as it is, or name a file on another file system",
        Severity.NOTE,
    ),
)
"""What runs need of a file system."""


def disk_space_findings(folder: Path, needed_bytes: int, purpose: str) -> Iterator[Finding]:
    """Find out whether the file system has room, by reserving it for a moment where it can (fallocate(2)).

    Args:
        folder: in which files can be created.
        needed_bytes: to reserve.
        purpose: what they are for.
    """
    system = FileSystem.of(folder)
    why, quota = "a run ends with an error when it can't write a checkpoint", system.quota_command(folder)
    if system.free_files is not None and system.free_files < FEW_FILES:
        yield Finding(
            check="room",
            severity=Severity.WARNING,  # some file systems make more files when they are needed
            problem=f"{folder}: only {system.free_files} more files can be created",
            why=why,
            remedy=f"remove files; `df -i {folder}` counts them, `{quota}` those of a quota",
        )
    if lack := _describe_lack(folder, system, needed_bytes, purpose):
        yield Finding(
            check="room",
            problem=f"{folder}: {lack}",
            why=why,
            remedy=f"remove what isn't needed, or set run_dir to another file system; `{quota}` shows a quota, "
            f"`df -h {folder}` the whole",
        )


def _describe_lack(folder: Path, system: FileSystem, needed_bytes: int, purpose: str) -> str:
    """Describe what is lacking for a purpose; empty if nothing is."""
    needed = scaled(needed_bytes, "B")
    # what isn't there isn't reserved: for a moment, that would take the rest from a run that is saving
    fits = system.free_bytes >= needed_bytes
    refusal = _reserve(folder, needed_bytes) if fits else None
    if refusal == errno.EDQUOT:
        return f"your quota of bytes or of files has no room for {needed}, {purpose}"
    if refusal is not None and system.lacks_files:
        return f"no file can be created, {purpose}: {system.describe_free()}"
    if not fits or refusal is not None:
        return f"{scaled(system.free_bytes, 'B')} are free, but {needed} are needed, {purpose}"
    return ""


def _reserve(folder: Path, count: int) -> int | None:
    """Reserve space in a file that is removed at once; the error's number if the file system refuses for want of room.

    A quota shows in no common way (user, group and project quotas, Lustre, GPFS), so this asks the file system itself,
    by fallocate(2) of the C library: `os.posix_fallocate` would write to each block where it isn't supported.
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


def check_folder(folder: Path) -> tuple[str, list[Finding]]:
    """Try what runs do in a folder, in a temporary one inside of it.

    Args:
        folder: that will hold run directories; it is made if it is missing.

    Returns:
        One line for the reader, and what doesn't work.
    """
    text = f"{folder}: can't be looked at"
    try:
        system = FileSystem.of(nearest_existing(folder))
        text = f"{folder}: {system.kind}, {scaled(system.free_bytes, 'B')} free"
        folder.mkdir(parents=True, exist_ok=True)
        trials = Path(tempfile.mkdtemp(dir=folder, prefix=".doctor-"))
    except OSError as error:
        finding = _full(folder, error) or Finding(
            check="folder",
            problem=f"{folder}: nothing can be written there ({describe_os_error(error)})",
            why="a run writes its configuration, logs and checkpoints there",
            remedy="set run_dir to a folder that you may write to, or type the command in one",
        )
        return text, [finding]
    findings: list[Finding] = []
    try:
        for trial in TRIALS:
            try:
                trial.act(trials)
            except OSError as error:
                if full := _full(folder, error):
                    findings.append(full)
                    break
                problem = f"{folder}: {trial.name} doesn't work ({describe_os_error(error)})"
                finding = Finding(
                    check="file system",
                    severity=trial.severity,
                    problem=problem,
                    why=trial.why,
                    remedy=trial.remedy,
                )
                findings.append(finding)
        else:
            findings += disk_space_findings(folder, NEEDED_BYTES, "for logs and records")
    finally:
        shutil.rmtree(trials, ignore_errors=True)
    return text, findings


def _full(folder: Path, error: OSError) -> Finding | None:
    """The finding on an operation that was refused for want of room; None if it was refused for another reason."""
    if error.errno not in FULL:
        return None
    return Finding(
        check="room",
        problem=f"{folder}: {limit_met(error, folder) or error.strerror}",
        why="a run can't write its records and checkpoints",
        remedy="remove what isn't needed, or set run_dir to another file system",
    )

"""Tries what runs do with files, in the folder that will hold them."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.doctor.finding import Finding, Severity
from hpctrain.doctor.room import full_finding, room_findings
from hpctrain.files import append_json_line, describe_os_error, fsync_directory, write_atomic
from hpctrain.run.file_system import FULL, FileSystem, nearest_existing

NEEDED_BYTES = 64 * 10**6
"""Room that the records and logs of a run may take, without its checkpoints."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One operation that runs rely on.

    Attributes:
        name: of the operation.
        act: tries it in an empty folder; raises an OSError if it doesn't work.
        severity: of its absence.
        why: what depends on it.
        remedy: what to do without it.
    """

    name: str
    act: Callable[[Path], None]
    severity: Severity
    why: str
    remedy: str


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


def _direct(folder: Path) -> None:
    os.close(os.open(folder / "direct", os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))


_ELSEWHERE = "set run_dir to a folder on another file system"
TRIALS = (
    Trial(
        "rename",
        _rename,
        Severity.ERROR,
        "checkpoints and records appear by a rename, and a run is claimed by making a folder",
        _ELSEWHERE,
    ),
    Trial(
        "fsync", _fsync, Severity.ERROR, "a checkpoint must be on the disk before an older one is removed", _ELSEWHERE
    ),
    Trial("append", _append, Severity.ERROR, "attempts, metrics and logs are appended to files", _ELSEWHERE),
    Trial(
        "locks",
        _lock,
        Severity.NOTE,
        "parallel.init_method=file://PATH locks that file",
        "leave parallel.init_method as it is, or name a file on another file system",
    ),
    Trial(
        "O_DIRECT",
        _direct,
        Severity.NOTE,
        "large saves then pass through the page cache, which takes memory",
        "nothing has to be done",
    ),
)
"""What runs need of a file system."""


@dataclass(frozen=True, slots=True)
class FolderCheck:
    """What was found out about the folder of the runs.

    Attributes:
        folder: that was tried; made if it was missing.
        system: its file system; None if it can't be looked at.
        works: the names of the operations that work.
        findings: what doesn't.
    """

    folder: Path
    system: FileSystem | None
    works: tuple[str, ...]
    findings: tuple[Finding, ...]


def check_folder(folder: Path) -> FolderCheck:
    """Try what runs do in a folder, in a temporary one inside of it.

    Args:
        folder: that will hold run directories; it is made if it is missing.
    """
    system = None
    try:
        system = FileSystem.of(nearest_existing(folder))
        folder.mkdir(parents=True, exist_ok=True)
        trials = Path(tempfile.mkdtemp(dir=folder, prefix=".doctor-"))
    except OSError as error:
        return FolderCheck(folder, system, (), (_unwritable(folder, error),))
    try:
        works, findings = [], []
        for trial in TRIALS:
            try:
                trial.act(trials)
                works.append(trial.name)
            except OSError as error:
                findings.append(_refused(folder, trial, error))
                if error.errno in FULL:
                    break
        else:
            findings += room_findings(folder, NEEDED_BYTES, "for logs and records")
    finally:
        shutil.rmtree(trials, ignore_errors=True)
    return FolderCheck(folder, system, tuple(works), tuple(findings))


def _unwritable(folder: Path, error: OSError) -> Finding:
    if error.errno in FULL:
        return full_finding(folder, error)
    problem = f"{folder}: nothing can be written there ({describe_os_error(error)})"
    why = "a run writes its configuration, logs and checkpoints there"
    return Finding(
        check="folder",
        severity=Severity.ERROR,
        problem=problem,
        why=why,
        remedy="set run_dir to a folder that you may write to, or type the command in one",
    )


def _refused(folder: Path, trial: Trial, error: OSError) -> Finding:
    if error.errno in FULL:
        return full_finding(folder, error)
    return Finding(
        check="file system",
        severity=trial.severity,
        problem=f"{folder}: {trial.name} doesn't work ({describe_os_error(error)})",
        why=trial.why,
        remedy=trial.remedy,
    )

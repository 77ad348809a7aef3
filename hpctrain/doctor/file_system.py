"""The file system of the run directories, tried from this machine."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.doctor.finding import Finding, Severity
from hpctrain.files import append_json_line, describe_os_error, fsync_directory, write_atomic
from hpctrain.phrases import scaled
from hpctrain.run.disk_reserve import FULL

NEEDED_BYTES = 64 * 10**6
"""Room that the records and logs of a run may take, without its checkpoints."""
FEW_FILES = 10_000
"""Files that must be left: a copy of the code alone may have thousands."""
QUOTA_COMMANDS = {
    "lustre": "lfs quota -h -u $USER {folder}",
    "gpfs": "mmlsquota --block-size auto",
    "beegfs": "beegfs-ctl --getquota --uid $USER",
    "btrfs": "btrfs qgroup show {folder}",
}
"""The command that shows a user's quota, by type of file system; elsewhere it is `quota -s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """The file system that holds a folder.

    Attributes:
        kind: its type, such as `lustre`; `unknown` without /proc.
        mount_point: where it is mounted.
        free_bytes: that this user may still use, as far as the file system counts quotas in that number.
        free_files: that can still be created; None without a limit.
        read_only: whether it is mounted so.
    """

    kind: str
    mount_point: str
    free_bytes: int
    free_files: int | None
    read_only: bool

    @classmethod
    def of(cls, folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> FileSystem:
        """The file system of a folder that exists.

        Args:
            folder: the folder.
            mounts: the mounted file systems, as proc(5) describes `mountinfo`.

        Raises:
            OSError: the folder can't be looked at.
        """
        found = os.statvfs(folder)
        kind, mount_point = _mount_of(folder, mounts)
        return cls(
            kind=kind,
            mount_point=mount_point,
            free_bytes=found.f_bavail * found.f_frsize,
            free_files=found.f_favail if found.f_files else None,
            read_only=bool(found.f_flag & os.ST_RDONLY),
        )

    def quota_command(self, folder: Path) -> str:
        """What shows the user's quota there."""
        return QUOTA_COMMANDS.get(self.kind, "quota -s").format(folder=folder)


def _mount_of(folder: Path, mounts: Path) -> tuple[str, str]:
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    best = ("unknown", "")
    path = os.path.realpath(folder)
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return best
    for line in lines:
        left, _, right = line.partition(" - ")
        fields = left.split()
        place = fields[4].encode().decode("unicode_escape")
        inside = path == place or path.startswith(place.rstrip("/") + "/")
        # btrfs has other device numbers in stat(2) than in its mounts
        if (
            inside
            and len(place) >= len(best[1])
            and (fields[2] == wanted or best[0] == "unknown" or len(place) > len(best[1]))
        ):
            best = (right.split()[0], place)
    return best


def nearest_existing(folder: Path) -> Path:
    """The folder, or the closest one above it that exists."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def room_findings(folder: Path, needed_bytes: int, purpose: str, *, nodes: tuple[str, ...] = ()) -> list[Finding]:
    """Find out whether the file system has room, by reserving it for a moment.

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
                severity=Severity.ERROR,
                problem=problem,
                why=why,
                remedy=f"remove files; `df -i {folder}` counts them",
                nodes=nodes,
            )
        )
    refusal = _reserve(folder, needed_bytes)
    if refusal == errno.EDQUOT:
        problem = f"{folder}: your quota has no room for {scaled(needed_bytes, 'B')}, {purpose}"
    elif refusal is not None or system.free_bytes < needed_bytes:
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
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


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
        Severity.WARNING,
        "searches (sweep=asha, sweep=optuna) lock their journal",
        "for searches, " + _ELSEWHERE,
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
        return FolderCheck(folder, system, (), (_unwritable(folder, system, error),))
    try:
        works, findings = [], []
        for trial in TRIALS:
            try:
                trial.act(trials)
                works.append(trial.name)
            except OSError as error:
                findings.append(_refused(folder, system, trial, error))
        if not any(one.check == "room" for one in findings):
            findings += room_findings(folder, NEEDED_BYTES, "for logs and records")
    finally:
        shutil.rmtree(trials, ignore_errors=True)
    return FolderCheck(folder, system, tuple(works), tuple(findings))


def _unwritable(folder: Path, system: FileSystem | None, error: OSError) -> Finding:
    if error.errno in FULL:
        return _full(folder, system, error)
    problem = f"{folder}: nothing can be written there ({describe_os_error(error)})"
    why = "a run writes its configuration, logs and checkpoints there"
    return Finding(
        check="folder",
        severity=Severity.ERROR,
        problem=problem,
        why=why,
        remedy="set run_dir to a folder that you may write to, or type the command in one",
    )


def _full(folder: Path, system: FileSystem | None, error: OSError) -> Finding:
    what = "your quota is used up" if error.errno == errno.EDQUOT else "the disk is full"
    command = f"df -h {folder}" if system is None else system.quota_command(folder)
    return Finding(
        check="room",
        severity=Severity.ERROR,
        problem=f"{folder}: {what}",
        why="a run can't write its records and checkpoints",
        remedy=f"remove what isn't needed, or set run_dir to another file system; `{command}` shows how much there is",
    )


def _refused(folder: Path, system: FileSystem | None, trial: Trial, error: OSError) -> Finding:
    if error.errno in FULL:
        return _full(folder, system, error)
    return Finding(
        check="file system",
        severity=trial.severity,
        problem=f"{folder}: {trial.name} doesn't work ({describe_os_error(error)})",
        why=trial.why,
        remedy=trial.remedy,
    )

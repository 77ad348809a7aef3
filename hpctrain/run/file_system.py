"""The file system that holds a folder: the limits that a failed write has met, and what an attempt reserves there."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.files import describe_os_error
from hpctrain.phrases import counted, scaled

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a file system, or a quota, that has no room: for bytes or for files."""
MUCH_BYTES = 2**28
"""Free bytes from which a refused write means something other than a full file system."""
FEW_FILES = 32
"""Free files below which a file system counts as out of files: a checkpoint or the end of an attempt needs several."""
QUOTA_COMMANDS = {
    "lustre": "lfs quota -h -u $USER {folder}",
    "gpfs": "mmlsquota --block-size auto",
    "beegfs": "beegfs-ctl --getquota --uid $USER",
    "btrfs": "btrfs qgroup show {folder}",
}
"""The command that shows a user's quota, by type of file system; elsewhere it is `quota -s`."""

RESERVE = "room"
RESERVED_BYTES = 256 * 2**10
"""Size of the file that the launcher and the ranks share: a traceback may be long."""
SMALL_RESERVED_BYTES = 16 * 2**10
"""Size of each other file."""
LAUNCHER_RESERVES = ("room_1", "room_2", "room_3")
"""For the marker of the end, a record that doesn't exist yet, and a temporary file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """The file system that holds a folder.

    Attributes:
        kind: its type, such as `lustre`; `unknown` without /proc.
        mount_point: where it is mounted.
        free_bytes: that this user may still use, as far as the file system counts quotas in that number.
        free_files: that can still be created; None without a limit.
    """

    kind: str
    mount_point: str
    free_bytes: int
    free_files: int | None

    @classmethod
    def of(cls, folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> FileSystem:
        """The file system of a folder that exists.

        Args:
            folder: the folder.
            mounts: the mounted file systems, as proc(5) describes `mountinfo`.

        Raises:
            OSError: the folder can't be looked at.
        """
        status = os.statvfs(folder)
        kind, mount_point = _mount_of(folder, mounts)
        return cls(
            kind=kind,
            mount_point=mount_point,
            free_bytes=status.f_bavail * status.f_frsize,
            free_files=status.f_favail if status.f_files else None,
        )

    @property
    def lacks_files(self) -> bool:
        """Whether hardly any file can be created, so that a refused write means that rather than bytes."""
        return self.free_files is not None and self.free_files < FEW_FILES

    def describe_free(self) -> str:
        """Describe the free space: the bytes, and the files if they are scarce."""
        free = f"{scaled(self.free_bytes, 'B')} are free"
        if not self.lacks_files:
            return free
        files = f"only {counted(self.free_files, 'more file')}" if self.free_files else "no more files"
        return f"{free}, but {files} (inodes) can be created"

    def quota_command(self, folder: Path) -> str:
        """The command that shows the user's quota there."""
        return QUOTA_COMMANDS.get(self.kind, "quota -s").format(folder=folder)


def _mount_of(folder: Path, mounts: Path) -> tuple[str, str]:
    """The type of the file system that is mounted closest above a folder, and where."""
    closest_mount, path = ("unknown", ""), os.path.realpath(folder)
    with contextlib.suppress(OSError):
        for line in mounts.read_text(errors="replace").splitlines():
            mount_fields, _, source_fields = line.partition(" - ")
            # spaces are written as \040
            place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount_fields.split()[4])
            inside = path == place or path.startswith(place.rstrip("/") + "/")
            # of two at one place, the later one hides the other
            if inside and len(place) >= len(closest_mount[1]):
                closest_mount = source_fields.split()[0], place
    return closest_mount


def limit_met(error: Exception, folder: Path) -> str:
    """Name the limit of the file system that a failed write has met, and the command that shows it; empty for others.

    Args:
        error: of the write; it may be that of another rank, or of another library, of which only the text is known.
        folder: in which it was to write, or one below it that doesn't exist yet.
    """
    limit_errors = (*FULL, errno.EROFS, errno.EFBIG)
    numbers_in_text = (number for number in limit_errors if os.strerror(number) in str(error))
    number = error.errno if isinstance(error, OSError) else next(numbers_in_text, None)
    if number == errno.EFBIG:
        largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        bound = "" if largest == resource.RLIM_INFINITY else f", which allows {scaled(largest, 'B')} here"
        return f"a file reached the largest size that is allowed: `ulimit -f` shows the limit of a process{bound}"
    if number in limit_errors:
        with contextlib.suppress(OSError):
            folder = nearest_existing(folder)
            return _limit_of(FileSystem.of(folder), number, folder)
    return ""


def _limit_of(system: FileSystem, number: int, folder: Path) -> str:
    place = system.mount_point or str(folder)
    if number == errno.EROFS:
        return f"{place} is read-only, perhaps because of a disk error: ask its administrator"
    if number == errno.EDQUOT:
        return f"your quota of bytes or of files on {place} is used up: `{system.quota_command(folder)}` shows both"
    if system.lacks_files:
        return f"{place} is out of files: {system.describe_free()}; `df -i {folder}` shows them"
    if system.free_bytes < MUCH_BYTES:
        return f"{place} is out of space: {system.describe_free()}; `df -h {folder}` shows it"
    # XFS reports the quota of a project so
    quota = f"perhaps the quota of a project or folder is used up; `{system.quota_command(folder)}` shows yours"
    return f"{place} refuses to store more, although {system.describe_free()}: {quota}"


def explain(error: OSError, path: Path | None = None) -> str:
    """Describe an error of the file system, and the limit that the write has met, if any.

    Args:
        error: as raised.
        path: the file or folder to write, if the message names it already; None has the text name the error's file.
    """
    text = describe_os_error(error) if path is None else error.strerror or str(error)
    place = path or (None if error.filename is None else Path(str(error.filename)))
    return "; ".join(filter(None, (text, "" if place is None else limit_met(error, place))))


def nearest_existing(folder: Path) -> Path:
    """The folder, or the closest one above it that exists."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def reserve(claim: Path) -> None:
    """Reserve the space and the files that the launcher needs at the end, and the space for a traceback if it fits.

    Raises:
        OSError: the disk is full already; nothing is reserved.
    """
    try:
        for name in LAUNCHER_RESERVES:
            # random, since some file systems store no zeros
            (claim / name).write_bytes(os.urandom(SMALL_RESERVED_BYTES))
    except OSError as error:
        if error.errno in FULL:
            release(claim)
            raise
    try:
        (claim / RESERVE).write_bytes(os.urandom(RESERVED_BYTES))
    except OSError:
        with contextlib.suppress(OSError):
            (claim / RESERVE).unlink(missing_ok=True)  # a part of it would leave nothing for the run itself


def reserve_for_rank(claim: Path, rank: int) -> None:
    """Reserve the file of a rank's exit record, if the disk isn't full."""
    with contextlib.suppress(OSError):
        _of_rank(claim, rank).write_bytes(os.urandom(SMALL_RESERVED_BYTES))


def release(claim: Path, rank: int | None = None) -> None:
    """Release what is left, once the end of the attempt is recorded, or that of a rank."""
    with contextlib.suppress(OSError):
        for path in claim.glob(f"{RESERVE}*") if rank is None else [_of_rank(claim, rank)]:
            path.unlink(missing_ok=True)


def write_with_reserve(claim: Path, write: Callable[[], None], *, rank: int | None = None) -> None:
    """Write; while the disk is full, release one reserved file after the other and write again.

    Args:
        claim: of the attempt.
        write: may be called several times.
        rank: the one that writes, which doesn't release the launcher's files; None for the launcher.

    Raises:
        OSError: it still can't be written.
    """
    files = [claim / name for name in (RESERVE, *LAUNCHER_RESERVES)]
    if rank is not None:
        files = [_of_rank(claim, rank), claim / RESERVE]
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
    return claim / f"{RESERVE}_of_rank_{rank}"

"""The file system that holds a folder."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

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
    """The type of the file system that is mounted closest above a folder, and where."""
    found, path = ("unknown", ""), os.path.realpath(folder)
    with contextlib.suppress(OSError):
        for line in mounts.read_text(errors="replace").splitlines():
            left, _, right = line.partition(" - ")
            # spaces are written as \040
            place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), left.split()[4])
            inside = path == place or path.startswith(place.rstrip("/") + "/")
            # of two at one place, the later one hides the other
            if inside and len(place) >= len(found[1]):
                found = right.split()[0], place
    return found


def nearest_existing(folder: Path) -> Path:
    """The folder, or the closest one above it that exists."""
    return next(place for place in (folder, *folder.parents) if place.exists())

"""The mark of a launch in its directory: it keeps other launches out, and lets one that was killed continue."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import RunDirectoryError
from hpctrain.files import TEMPORARY_PREFIX, open_file, read_json_or_empty
from hpctrain.run.directory import RunDirectory

_BEGINNING = b'{"command": '
_OF_A_RUN = {"attempts", "checkpoints", "code.jsonl", "logs", "manifest.json"}
"""What a launch writes into the folder of a sweep's run before its configuration."""


@dataclass(frozen=True, slots=True)
class LaunchMark:
    """``launching.json``, the first file of a launch in the directory of a run or a sweep, and the last one it removes.

    Whatever kills the launch, the mark stays, so that the directory isn't taken for a folder of other files: the same
    command continues there. ``config.yaml`` can't be the first file: readers take a directory with it for a complete
    run. Nor can a directory be renamed into place, which the user may have made.

    The launch holds a lock on the file, which the kernel releases when the process dies; NFS shows other machines no
    lock of a folder. Without locks, the claim of the attempt decides between two launches.

    Args:
        directory: of the run or the sweep.
    """

    directory: RunDirectory

    @contextlib.contextmanager
    def held(self, command: Sequence[str], *, requeued: bool = False) -> Iterator[None]:
        """Make the directory if it is absent, and hold its mark; an error inside the context leaves an earlier mark.

        Args:
            command: as typed.
            requeued: whether SLURM has ended the process that may still hold the lock: a file server takes a minute to
                notice the death of a node.

        Raises:
            RunDirectoryError: another launch holds it; or a file of the user has its name; or the directory can't be
                created.
        """
        path = self.directory.launching
        self.directory.make()
        with self.directory.explained():
            was_there = os.path.lexists(path)
            if was_there and not self.exists():
                raise RunDirectoryError(
                    f"run_dir={self.directory.path}: {path.name} there is not a file of hpctrain, which marks a launch "
                    "by this name; choose another run_dir, or rename the file"
                )
            file = self._open()
        try:
            is_locked = _lock(file)
            if not requeued and (not is_locked or not os.fstat(file).st_nlink):
                raise RunDirectoryError(
                    f"run_dir={self.directory.path}: another command is launching a run there; see "
                    f"`python -m hpctrain status {self.directory.as_typed}`, or choose another run_dir"
                )
            if was_there:
                self.remove_temporary_files()
            if not self.directory.config.exists() and not self.directory.sweep.exists():
                with contextlib.suppress(OSError):  # another user's mark, or a full disk: the name alone is a mark
                    os.pwrite(file, json.dumps({"command": list(command), "folder": str(Path.cwd())}).encode(), 0)
            try:
                yield
            except BaseException:
                if not was_there:
                    self._remove()
                raise
            self._remove()
        finally:
            os.close(file)

    def _remove(self) -> None:
        # in a sticky folder, that of another user stays, which says nothing once there is a configuration
        with contextlib.suppress(OSError):
            self.directory.launching.unlink(missing_ok=True)

    def exists(self) -> bool:
        """Whether the directory has the mark of a launch, and not a file of the user with this name."""
        try:
            if self.directory.launching.is_symlink():
                return False
            with open_file(self.directory.launching) as file:
                # a launch that was killed, or met a full disk, may have written less
                return _BEGINNING.startswith(file.read(len(_BEGINNING)))
        except PermissionError:
            return True  # of another user
        except OSError:
            return False

    def _open(self) -> int:
        try:
            return os.open(self.directory.launching, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except PermissionError:  # of another member of the group
            # without O_CREAT, which the kernel refuses for a file of another user in a sticky folder
            return os.open(self.directory.launching, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def remove_temporary_files(self) -> None:
        """Remove what a killed launch was writing."""
        for folder in (self.directory.path, self.directory.code):
            for path in folder.glob(f"{TEMPORARY_PREFIX}*"):
                shutil.rmtree(path, ignore_errors=True)
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    @property
    def is_unfinished(self) -> bool:
        """Whether the directory holds part of a run: its launch is under way, or was killed.

        The runs of a sweep have no marks of their own.
        """
        directory = self.directory
        if directory.config.exists() or directory.claimed_attempts():
            return False
        return self.exists() or (directory.path.name.isdecimal() and self._is_of_unfinished_sweep())

    def _is_of_unfinished_sweep(self) -> bool:
        # the user may have a folder with such a name beside the runs
        path = self.directory.path
        names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
        foreign_names = [name for name in names - _OF_A_RUN if not name.startswith((TEMPORARY_PREFIX, ".nfs"))]
        return not foreign_names and LaunchMark(RunDirectory(path.parent)).exists()

    def describe_unfinished(self) -> str:
        """Say in one line that the launch was killed before the run or the sweep was complete, and what to type.

        Empty if there was no such launch.
        """
        path = self.directory.launching
        if self.directory.config.exists() or not self.exists():
            return ""
        what = "its launch is under way, or was killed before it was complete"
        # another user's mark could propose a harmful command
        mark = read_json_or_empty(path) if path.stat().st_uid == os.geteuid() else {}
        command, folder = mark.get("command"), mark.get("folder")
        if not isinstance(command, list) or not isinstance(folder, str):
            # without a command, the mark of a sweep is that of a later change of it
            return "" if self.directory.sweep.exists() else f"{what}; to continue it, type its command again"
        has_run_dir = any(str(word).startswith("run_dir=") for word in command)
        run_dir_hint = "" if has_run_dir else f" with run_dir={self.directory.as_typed}"
        return f"{what}; to continue it, type `{shlex.join(map(str, command))}`{run_dir_hint} in {folder}"


def _lock(file: int) -> bool:
    """Lock a file; return whether no other process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, such as Lustre without the option flock
        return True
    return True

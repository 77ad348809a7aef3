"""The mark of a launch in its directory: other launches stay out, and one that was killed can be repeated."""

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
from hpctrain.files import TEMPORARY_PREFIX, read_json_or_empty
from hpctrain.run.directory import RunDirectory


@dataclass(frozen=True, slots=True)
class LaunchMark:
    """``launching.json``, the first file of a launch in the directory of a run or a sweep, and the last one it removes.

    Whatever kills the launch, the mark stays, so that the directory isn't taken for a folder of other files: the same
    command continues there. The launch holds a lock on the file, which the kernel releases when the process dies.

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
            RunDirectoryError: another launch holds it; or the directory can't be created.
        """
        path = self.directory.launching
        self.directory.make()
        with self.directory.explained():
            was_there = path.exists()
            file = self._open()
        try:
            is_locked = _lock(file)
            if not requeued and (not is_locked or not os.fstat(file).st_nlink):
                raise RunDirectoryError(
                    f"run_dir={self.directory.path}: another command launches a run there at this moment; see "
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
                    path.unlink(missing_ok=True)
                raise
            path.unlink(missing_ok=True)
        finally:
            os.close(file)

    def _open(self) -> int:
        flags = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(self.directory.launching, flags | os.O_RDWR, 0o666)
        except PermissionError:  # of another member of the group
            return os.open(self.directory.launching, flags | os.O_RDONLY, 0o666)

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
        directory, home = self.directory, RunDirectory(self.directory.path.parent)
        if not directory.launching.exists() and not (directory.path.name.isdecimal() and home.launching.exists()):
            return False
        return not directory.config.exists() and not directory.claimed_attempts()

    def describe_unfinished(self) -> str:
        """Say in one line that the launch was killed before the run or the sweep was complete, and what to type.

        Empty if there was no such launch.
        """
        path = self.directory.launching
        if self.directory.config.exists() or not path.exists():
            return ""
        what = "its launch is under way, or was killed before it was complete"
        # a command that another user proposes isn't shown
        found = read_json_or_empty(path) if path.stat().st_uid == os.geteuid() else {}
        command, folder = found.get("command"), found.get("folder")
        if not isinstance(command, list) or not isinstance(folder, str):
            # without a command, the mark of a sweep is that of a later change of it
            return "" if self.directory.sweep.exists() else f"{what}; to repeat it, type its command again"
        named = any(str(word).startswith("run_dir=") for word in command)
        more = "" if named else f" with run_dir={self.directory.as_typed}"
        return f"{what}; to repeat it, type `{shlex.join(map(str, command))}`{more} in {folder}"


def _lock(file: int) -> bool:
    """Lock a file; return whether no other process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, such as Lustre without the option flock
        return True
    return True

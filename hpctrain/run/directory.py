"""The run directory: the only module that defines its paths.

Why it is like this: docs/adr/0001-run-directory-and-claims.md.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import Any, TypeVar

from hpctrain.errors import RunDirectoryError, RunDirectoryUnavailableError
from hpctrain.files import TEMPORARY_PREFIX, fsync_directory
from hpctrain.run.file_system import explain

R = TypeVar("R")

STEP_DIGITS = 8  # so that `ls` lists checkpoints in the order of their steps
SET_ASIDE = re.compile(rf"damaged-step_(?P<step>\d{{{STEP_DIGITS},}})-[0-9a-f]{{8}}")
"""Names of damaged checkpoints that a resume passed over."""
REPLACED = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}replaced-step_(?P<step>\d{{{STEP_DIGITS},}})-[0-9a-f]{{8}}")
"""Names of checkpoints that make way for a new one of their step."""


if sys.version_info >= (3, 14):

    class RunPath(PosixPath):
        """A path whose look-ups raise if the file system fails, as those of pathlib did before Python 3.14.

        Since then they answer that there is nothing: a run would take a failure for a missing checkpoint or claim.
        """

        def exists(self, *, follow_symlinks: bool = True) -> bool:
            """See `Path`."""
            return self._mode(follow_symlinks=follow_symlinks) is not None

        def is_dir(self, *, follow_symlinks: bool = True) -> bool:
            """See `Path`."""
            return stat.S_ISDIR(self._mode(follow_symlinks=follow_symlinks) or 0)

        def is_file(self, *, follow_symlinks: bool = True) -> bool:
            """See `Path`."""
            return stat.S_ISREG(self._mode(follow_symlinks=follow_symlinks) or 0)

        def is_symlink(self) -> bool:
            """See `Path`."""
            return stat.S_ISLNK(self._mode(follow_symlinks=False) or 0)

        def _mode(self, *, follow_symlinks: bool) -> int | None:
            try:
                return self.stat(follow_symlinks=follow_symlinks).st_mode
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP):
                    return None
                raise
            except ValueError:  # a null byte
                return None
else:
    RunPath = Path


class PathIn:
    """An attribute of the class of a folder: the path of a file or a folder in it.

    Args:
        place: relative to the folder's `path`.
    """

    def __init__(self, place: str) -> None:
        self._place = place

    def __get__(self, folder: Any, _owner: type[Any]) -> Path:
        return RunPath(folder.path, self._place)


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of one run; it holds no open files.

    Args:
        path: the directory, absolute.
    """

    path: Path

    config = PathIn("config.yaml")
    """The resolved configuration."""
    config_before = PathIn("config.before.yaml")
    """The configuration before the last resume's change, until an attempt has trained with the change."""
    config_changes = PathIn("config_changes.jsonl")
    """One record per resume that changed what decides the weights; see `hpctrain.run.config_change`."""
    sweep = PathIn("sweep.json")
    """In a sweep's directory: how the sweep finds its runs; see `SweepRecord`."""
    launching = PathIn("launching.json")
    """In the directory of a launch that is under way or was killed; see `LaunchMark`."""
    manifest = PathIn("manifest.json")
    """Command, git commit and diff, versions, host."""
    attempts = PathIn("attempts.jsonl")
    """The ledger: one start and one end record per attempt."""
    code = PathIn("code")
    """Copies of the code, each with a list of its files."""
    code_records = PathIn("code.jsonl")
    """One record per copy of the code with which the run was launched or resumed."""
    metrics = PathIn("metrics.jsonl")
    """One record per logged step."""
    saves = PathIn("saves.jsonl")
    """One record per save that a program reported; see `hpctrain.run.saves`."""
    metrics_csv = PathIn("metrics.csv")
    """The same as a table, if `logger.csv` is set."""
    media = PathIn("media")
    """Images, texts and other media that the task logs."""
    media_records = PathIn("media.jsonl")
    """One record per medium."""
    sync = PathIn("sync")
    """What was sent to W&B and MLflow."""
    jobs = PathIn("jobs.jsonl")
    """One record per submission to a scheduler, and per cancellation; see `JobRecords`."""
    checkpoints = PathIn("checkpoints")
    """One directory per checkpoint."""
    earlier = PathIn("earlier")
    """Metrics and other records that a resume dropped because checkpoints were gone; a folder per attempt."""
    tensorboard = PathIn("tensorboard")
    """TensorBoard's event files."""
    logs = PathIn("logs")
    """The output of ranks and batch scripts."""
    submitit = PathIn("logs/submitit")
    """The scripts of jobs, and the pickled calls that they make."""
    claims = PathIn("attempts")
    """One directory per attempt: creating it claims the run, and it keeps the exit records of the ranks."""
    launcher_log = PathIn("logs/launcher.log")
    """What the launcher of a run printed that `hpctrain.submit` started on this machine."""
    notify_log = PathIn("logs/notify.log")
    """The output of `notify.command`, over all attempts."""
    sweep_stop_file = PathIn("sweep_stop")
    """In a sweep's directory: by it the user keeps a sweep on one machine from beginning another run."""

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """The run directory at ``path``, made absolute; it need not exist."""
        return cls(RunPath(os.path.abspath(path)))  # noqa: PTH100 - resolve() would follow a link that the user wants kept

    @classmethod
    def existing(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """The run directory at ``path``.

        Raises:
            RunDirectoryError: it doesn't exist, or isn't a run directory.
        """
        directory = cls.at(path)
        if not directory.config.is_file():
            problem = "it has no config.yaml" if directory.path.is_dir() else "no such directory"
            raise RunDirectoryError(
                f"{path} is not a run directory: {problem}; `python -m hpctrain status` lists the runs under runs/"
            )
        return directory

    @property
    def as_typed(self) -> str:
        """The path quoted for a shell, for commands that are shown to the user."""
        return shlex.quote(str(self.path))

    @property
    def step_name(self) -> str:
        """The name of SLURM's steps of the run, by which a new supervisor finds its ranks: others are the user's."""
        return f"hpctrain_{zlib.crc32(os.fsencode(self.path)):08x}"

    def bundle(self, name: str) -> Path:
        """The description of the container of an attempt's ranks, for SLURM's own containers."""
        return self.path / "containers" / name

    def attempt(self, number: int) -> Path:
        """The folder of one attempt, counted from 1, which `Ledger.claim` makes."""
        return self.claims / f"{number:04d}"

    def newest(self, read: Callable[[Path], R | None], claims: Sequence[int] | None = None) -> R | None:
        """The newest record that any attempt left in its claim; None without one.

        Args:
            read: the record in a claim, if there is one.
            claims: the attempts that claimed the run, if they are known already; oldest first.
        """
        claims = self.claimed_attempts() if claims is None else claims
        records = (read(self.attempt(attempt)) for attempt in reversed(claims))
        return next((record for record in records if record is not None), None)

    def claimed_attempts(self) -> list[int]:
        """Numbers of the attempts that claimed the run, oldest first."""
        return sorted(int(name) for name in _names(self.claims) if name.isdecimal())

    def checkpoint(self, step: int) -> Path:
        """The directory of the checkpoint of ``step``."""
        return self.checkpoints / f"step_{step:0{STEP_DIGITS}d}"

    def rank_log(self, rank: int | str) -> Path:
        """The output of one rank, over all attempts."""
        return self.logs / f"rank_{rank}.log"

    def sample_log(self, rank: int | str) -> Path:
        """The samples of one rank, step by step, if `logger.samples` is set."""
        return self.logs / f"samples_{rank}.jsonl"

    def trace(self, rank: int) -> Path:
        """The trace of `trainer.profile`, for Perfetto and TensorBoard's profiler plugin."""
        return self.path / "profile" / f"rank_{rank}.pt.trace.json"

    def stacks(self, attempt: int, rank: int | str) -> Path:
        """The Python stacks of one rank: from its watchdog, and on request."""
        return self.logs / f"stacks_{attempt}_{rank}.txt"

    def stacks_request(self, attempt: int) -> Path:
        """The file where the ranks of an attempt look for requests for their stacks."""
        return self.attempt(attempt) / "stacks_requested"

    def stop_file(self, attempt: int) -> Path:
        """The file by which the user cancels an attempt: its ranks look for it, on any machine."""
        return self.attempt(attempt) / "stop"

    def is_cancelled(self, attempt: int) -> bool:
        """Whether an attempt has a stop file, as far as the file system can tell."""
        return os.path.exists(self.stop_file(attempt))  # noqa: PTH110 - never raises

    def ranks_with(self, pattern: Path) -> list[int]:
        """The ranks that have such a file; ``pattern`` is the path for the rank `*`, as in ``rank_log("*")``."""
        names = (path.stem.rpartition("_")[2] for path in pattern.parent.glob(pattern.name))
        return sorted(int(name) for name in names if name.isdecimal())

    def checkpoint_steps(self) -> list[int]:
        """Steps of the published checkpoints, oldest first, whether they are intact or not."""
        # names may have more digits than STEP_DIGITS: a step beyond 99,999,999 makes a longer name
        pattern = re.compile(rf"step_(\d{{{STEP_DIGITS},}})")
        matches = map(pattern.fullmatch, _names(self.checkpoints))
        return sorted(int(match[1]) for match in matches if match)

    def set_aside(self) -> list[Path]:
        """Damaged checkpoints that a resume passed over and renamed, oldest step first."""
        matches = filter(None, map(SET_ASIDE.fullmatch, _names(self.checkpoints)))
        return [
            self.checkpoints / match[0] for match in sorted(matches, key=lambda match: (int(match["step"]), match[0]))
        ]

    def moved_aside(self) -> dict[int, Path]:
        """Checkpoints that made way for new ones which aren't there, by step; the next attempt puts them back."""
        names = _names(self.checkpoints)
        matches = filter(None, map(REPLACED.fullmatch, names))
        aside = {int(match["step"]): self.checkpoints / match[0] for match in matches}
        return {step: path for step, path in aside.items() if self.checkpoint(step).name not in names}

    def create(self, mode: int) -> None:
        """Create the directory and the folders in it; parents follow the umask, the run itself gets ``mode``.

        Raises:
            RunDirectoryError: the directory can't be created, or belongs to another user and has another mode.
        """
        with self.explained():
            self._create(mode)
            with self.permissions():
                for folder in (self.logs, self.claims, self.checkpoints):
                    folder.mkdir(exist_ok=True)
            fsync_directory(self.path)

    def create_for_sweep(self, mode: int) -> None:
        """Create the directory of a sweep; one that holds files already keeps its permissions.

        Raises:
            RunDirectoryError: the directory can't be created.
        """
        with self.explained():
            if not set(_names(self.path)) - {self.launching.name}:
                self._create(mode)

    def make(self) -> None:
        """Make the directory if it is absent, closed to others until `create` or `create_for_sweep` gives it its mode.

        Raises:
            RunDirectoryError: it can't be created.
        """
        with self.explained():
            # the umask may allow more than the mode
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _create(self, mode: int) -> None:
        self.make()
        current_mode = stat.S_IMODE(self.path.stat().st_mode)
        new_mode = mode | current_mode & stat.S_ISGID  # chmod would drop the bit that a shared folder passes on
        if current_mode == new_mode:
            return  # another user of the group who resumes the run isn't allowed to change its mode
        if os.geteuid() not in (0, self.path.stat().st_uid):
            raise RunDirectoryError(
                f"run_dir={self.path}: it has the permissions {current_mode:o} and belongs to another user, so they "
                f"can't be changed to {new_mode:o}; leave run_mode as it is"
            )
        self.path.chmod(new_mode)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Explain an error of the file system inside the context as one of the directory."""
        try:
            yield
        except OSError as error:
            problem = f"can't be created ({explain(error, self.path)}); choose a folder that you may write to"
            raise RunDirectoryUnavailableError(f"run_dir={self.path}: {problem}") from error

    @contextmanager
    def permissions(self, mode: int = 0o777) -> Iterator[None]:
        """Context manager in which what this process creates gets the directory's permissions, whatever the umask.

        The umask belongs to the process, so it changes for all threads.

        The folder of a sweep may have been there before, and be more open than its runs: `sweep.json` has their mode.

        Args:
            mode: the most to give, if the directory may be a sweep's that has no `sweep.json` yet.
        """
        before = os.umask(umask_of(self.path.stat().st_mode & self._mode_of_sweep() & mode))
        try:
            yield
        finally:
            os.umask(before)

    def _mode_of_sweep(self) -> int:
        """Permissions of the sweep's runs; everything if this isn't the folder of a sweep."""
        try:
            mode = self.sweep.lstat().st_mode
        except OSError:
            return 0o777
        # a folder may be entered by those who may read the file
        return mode | (mode & 0o444) >> 2

    def close_folder(self, folder: Path, mode: int) -> None:
        """Create a folder that others may write to only if both the run directory's mode and ``mode`` allow it.

        Raises:
            RunDirectoryError: another user has created it, or it can't be created.
        """
        with self.explained():
            folder.mkdir(exist_ok=True)
            home, status = self.path.stat(), folder.stat()
            allowed = home.st_mode & mode
            strangers = {status.st_uid, folder.lstat().st_uid} - {os.geteuid(), 0, home.st_uid}
            # in a folder such as /scratch, any user may have come first; in that of a group, one of its members
            if strangers and (home.st_mode & stat.S_IWOTH or not allowed & stat.S_IWGRP):
                raise RunDirectoryError(
                    f"run_dir={self.path}: {folder} belongs to another user, who could replace what your jobs execute; "
                    "choose another folder"
                )
            if excess := status.st_mode & ~allowed & (stat.S_IWGRP | stat.S_IWOTH):
                folder.chmod(stat.S_IMODE(status.st_mode) & ~excess)


def umask_of(mode: int) -> int:
    """The umask with which a process gives others no more, and no less, than a run directory of this mode does."""
    return ~mode & 0o777


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []

"""Runs and sweeps among the code of a launch: they are recognised by what hpctrain wrote, and aren't copied."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hpctrain.launch.code_choice import NEVER, is_below
from hpctrain.run.directory import RunDirectory
from hpctrain.run.launch_mark import LaunchMark

COPY = re.compile(r"\.tmp-.*|([0-9a-f]{32}|damaged-[0-9a-f]{32}-[0-9a-f]{8})(\.json)?")
"""Names in a folder `code` of copies and of their lists."""

LOG = re.compile(r"batch_[0-9]+(_[0-9]+)?\.log")
"""Names in a folder `logs` of the batch scripts' logs."""
RECORDS = ("sweep.json", "search", "jobs.jsonl", "code.jsonl")
"""What a sweep's folder has beside its runs, copies and logs."""


class Runs:
    """The runs and sweeps below a folder of code.

    Of a sweep's folder only its runs, its records, its copies of the code, and the scripts and the logs of its jobs are
    left out: users keep notes and code beside them.

    Args:
        root: of the code, without symbolic links.
        home: the directory of the launch's own run or sweep, which exists.
    """

    def __init__(self, root: Path, home: Path) -> None:
        self._root = root
        self._home = os.path.relpath(os.path.realpath(home), root)
        self._is_run = is_run(home)
        self._folders: dict[str, bool] = {"": False}
        self._sweeps: dict[str, bool] = {}

    def contain(self, path: str) -> bool:
        """Whether a file or a folder was made by a launch; the path is relative to the root."""
        folder, _, name = path.rpartition("/")
        if self.contain_folder(folder) or _is_copy(folder, name):
            return True
        there = RunDirectory(self._root / folder)
        if name == there.launching.name and LaunchMark(there).exists():
            return True
        return self._is_record(folder, name) or self._is_log(folder, name)

    def contain_folder(self, path: str) -> bool:
        """Whether a folder was made by a launch, or is a run itself."""
        if (known := self._folders.get(path)) is None:
            known = self._folders[path] = self.contain(path) or is_run(self._root / path) or self._has_scripts(path)
        return known

    def _is_record(self, folder: str, name: str) -> bool:
        """Whether a file or a folder has what is recorded of a sweep."""
        if name not in RECORDS or not os.path.lexists(RunDirectory(self._root / folder).sweep):
            return False
        return self._is_sweep(folder)

    def _is_log(self, folder: str, name: str) -> bool:
        """Whether a file is the log of a batch script of a sweep."""
        parent, _, last = folder.rpartition("/")
        return last == "logs" and LOG.fullmatch(name) is not None and self._is_sweep(parent)

    def _is_sweep(self, folder: str) -> bool:
        """Whether a folder has the runs of a sweep."""
        if (known := self._sweeps.get(folder)) is None:
            # glob passes over a folder that can't be read
            found = any(map(is_run, (self._root / folder).glob("[0-9]*")))
            known = self._sweeps[folder] = found or (folder or ".") == self._home
        return known

    def _has_scripts(self, path: str) -> bool:
        """Whether a folder has the scripts of a sweep's jobs."""
        if not f"/{path}".endswith("/logs/submitit"):
            return False
        return self._is_sweep(path.removesuffix("logs/submitit").removesuffix("/"))

    def contain_or_record(self, path: str) -> bool:
        """Whether a file or a folder belongs to the launch's own run or sweep."""
        return is_below(path, self._home) and (self._is_run or self.contain_folder(path))

    def allow_link(self, path: str) -> bool:
        """Whether the copy may have a link to a file or a folder that isn't copied."""
        name = path.rpartition("/")[2]
        if name in NEVER or name.endswith(".pyc") or self.contain(path) or self.contain_or_record(path):
            return False
        # a link to a folder that contains the copy would send tools that follow links around in circles
        return not is_below(os.path.normpath(f"{self._home}/code"), path)


def _is_copy(folder: str, name: str) -> bool:
    return folder.rpartition("/")[2] == "code" and COPY.fullmatch(name) is not None


def is_run(folder: Path) -> bool:
    """Whether a folder has what hpctrain writes when it launches a run; a configuration alone may be anything's."""
    run = RunDirectory(folder)
    if os.path.lexists(run.config):
        return any(map(os.path.lexists, (run.claims, run.attempts, run.jobs, run.code_records)))
    # a run that is being made has no configuration yet
    return all(path.is_dir() for path in (run.claims, run.checkpoints, run.logs))

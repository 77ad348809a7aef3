"""The files that belong to the code of a launch: what git knows, or else what the working directory contains."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hpctrain.launch.code_choice import (
    NEVER,
    Choice,
    CodeFiles,
    CodeFilesError,
    is_home,
    require_few_files,
    too_many_bytes,
)
from hpctrain.launch.code_repository import find_in_repository
from hpctrain.launch.code_runs import Runs

SMALL_BYTES = 1_000_000
"""Outside of git, only files up to this size count as code."""


def find_code(
    folder: Path, exclude: Sequence[str], home: Path, max_bytes: float, include: Sequence[str] = ()
) -> CodeFiles:
    """Find the code of a launch.

    Args:
        folder: the working directory, without symbolic links.
        exclude: patterns of files and folders that aren't copied.
        home: the directory of the run or the sweep, which may be inside of the code.
        max_bytes: where the search outside of git ends.
        include: patterns of files that are copied although their names are usual for secrets.

    Raises:
        CodeFilesError: there is too much, or git fails.
    """
    found = find_in_repository(folder, exclude, home, include)
    if found is None:
        found = CodeFiles(folder, ".")
        chosen = Choice(exclude, include, folder)
        _Folder(found, chosen, Runs(folder, home), max_bytes).add_files()
        found.secrets.update(chosen.secrets)
        found.untracked.update(found.copied)
    return found


class _Folder:
    """Collects the small files of a folder that isn't in a repository.

    Args:
        found: gets the files.
        chosen: decides which are left out.
        runs: that aren't copied.
        max_bytes: where the search ends.
    """

    def __init__(self, found: CodeFiles, chosen: Choice, runs: Runs, max_bytes: float) -> None:
        self._found = found
        self._chosen = chosen
        self._runs = runs
        self._max_bytes = max_bytes
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def add_files(self) -> None:
        """Look through the folder, but not for long."""
        root = self._found.root
        if is_home(root):
            remedy = "change into the folder of your code, or set code.snapshot=none"
            raise CodeFilesError(f"{root} is not a folder of code", remedy)
        folders = [""]
        while folders:
            prefix = folders.pop()
            try:
                entries = sorted(os.scandir(root / prefix), key=lambda entry: entry.name)
            except OSError:
                continue  # of another user, or removed meanwhile
            folders += filter(None, [self._add(f"{prefix}{entry.name}", entry) for entry in entries])

    def _add(self, path: str, entry: os.DirEntry[str]) -> str | None:
        """Add an entry; return a folder that is to be searched, with a slash at the end."""
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name in NEVER or (self._runs.contain_folder(path) if is_folder else self._runs.contain(path)):
            return None
        left_out = self._chosen.left_out_folder(path) if is_folder else self._chosen.left_out(path)
        if left_out or (is_folder and _is_foreign(entry)):
            self._link(path)
            return None
        # folders and large files as well, which bounds the search
        self._counts[path.partition("/")[0]] += 1
        require_few_files(self._found, self._counts)
        if is_folder:
            self._found.folders.append(path)
            return f"{path}/"
        if entry.is_symlink():
            self._found.copied[path] = 0
        elif entry.is_file(follow_symlinks=False):
            self._add_file(path, entry)
        return None

    def _add_file(self, path: str, entry: os.DirEntry[str]) -> None:
        try:
            size = entry.stat(follow_symlinks=False).st_size
        except OSError:
            return
        if size > SMALL_BYTES:
            self._link(path)
        elif not path.endswith(".pyc"):
            self._found.copied[path] = size
            self._bytes[path.partition("/")[0]] += size
            if self._bytes.total() > self._max_bytes:
                raise too_many_bytes(self._found, self._bytes, self._max_bytes)

    def _link(self, path: str) -> None:
        if self._runs.allow_link(path):
            self._found.linked.append(path)


def _is_foreign(folder: os.DirEntry[str]) -> bool:
    """Whether a folder outside of git isn't code: a cache or an environment."""
    names = ("pyvenv.cfg", "conda-meta")
    return folder.name.startswith(".") or any(os.path.lexists(f"{folder.path}/{name}") for name in names)

"""Find runs under a folder, or by the path or name that a user types."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hpctrain.errors import RunDirectoryError
from hpctrain.phrases import listed
from hpctrain.run.directory import RunDirectory
from hpctrain.run.launch_mark import LaunchMark

MAX_DEPTH = 6
"""Levels of folders to search: NAME/DATE_TIME, the numbers of a sweep, and a few that the user made."""
MAX_LINK_DEPTH = 2
"""Levels on which links to folders are followed; deeper ones may lead anywhere."""


def find_runs(root: Path) -> list[RunDirectory]:
    """Find the run directories at and under ``root``, newest first by the time of their config.yaml.

    Hidden folders, and folders inside a run, are skipped; so is the copied code of a sweep. A folder that doesn't exist
    has no runs.
    """
    dated_folders: list[tuple[float, Path]] = []
    pending = [(root, 0)]
    while pending:
        folder, depth = pending.pop()
        # not rglob: it would walk through the checkpoints and logs of every run, on a shared file system
        entries = _entries(folder)
        if config := next((entry for entry in entries if entry.name == "config.yaml" and _is(entry.is_file)), None):
            with contextlib.suppress(OSError):  # it was removed in the meantime
                dated_folders.append((config.stat().st_mtime, folder))
        elif depth < MAX_DEPTH:
            follow = depth < MAX_LINK_DEPTH
            folders = (entry for entry in entries if _is(partial(entry.is_dir, follow_symlinks=follow)))
            # the copied code may contain a config.yaml of its own
            is_sweep = any(entry.name in ("sweep.json", "launching.json") for entry in entries)
            visible = (entry for entry in folders if entry.name[0] != "." and not (is_sweep and entry.name == "code"))
            pending += [(Path(entry.path), depth + 1) for entry in visible]
    return [RunDirectory.at(folder) for _, folder in sorted(dated_folders, reverse=True)]


def runs_of(path_or_name: str, runs_dir: Path) -> list[RunDirectory]:
    """Find the run, or all runs of a sweep or folder, that a user names by a path or by a name under ``runs_dir``.

    Raises:
        RunDirectoryError: no run matches.
    """
    for path in (Path(path_or_name), runs_dir / path_or_name):
        if runs := find_runs(path):
            return runs
        if _is(path.is_dir) and not os.access(path, os.R_OK | os.X_OK):
            raise RunDirectoryError(f"{path_or_name}: you have no permission to read the folder {path}; ask its owner")
        if unfinished := LaunchMark(RunDirectory.at(path)).describe_unfinished():
            raise RunDirectoryError(f"{path_or_name}: {unfinished}")
    exists = any(_is(path.is_dir) for path in (Path(path_or_name), runs_dir / path_or_name))
    where = "it contains no run" if exists else f"no such path, here or under {runs_dir}/"
    raise RunDirectoryError(f"{path_or_name}: {where}; `python -m hpctrain status` lists the runs under {runs_dir}/")


def run_of(path_or_name: str, runs_dir: Path) -> RunDirectory:
    """Find the one run that a user names.

    Raises:
        RunDirectoryError: no run matches, or several do.
    """
    runs = runs_of(path_or_name, runs_dir)
    if len(runs) > 1:
        names = listed(sorted(os.path.relpath(run.path) for run in runs), max_names=4)
        raise RunDirectoryError(f"{path_or_name}: it contains {len(runs)} runs; name one of them: {names}")
    return runs[0]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        # another user's private run among those of a group, or a folder that was just removed
        return []


def _is(check: Callable[[], bool]) -> bool:
    # a link to itself, or into a folder of another user, raises an error
    try:
        return check()
    except OSError:
        return False

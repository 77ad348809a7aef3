"""Finding runs: under a folder, or by what a user types for one."""

from __future__ import annotations

import os
from pathlib import Path

from hpctrain.errors import RunDirectoryError
from hpctrain.phrases import listed
from hpctrain.run.directory import RunDirectory

MAX_DEPTH = 6
"""Levels of folders that are looked through: NAME/DATE_TIME, a sweep's numbers, and some of the user's own."""
MAX_LINK_DEPTH = 2
"""Levels on which links to folders are followed."""


def find_runs(root: Path) -> list[RunDirectory]:
    """The run directories at and under ``root``, newest first; hidden folders and those in a run are passed over.

    A run is as old as its config.yaml. Where there is no such folder there are no runs.
    """
    found: list[tuple[float, Path]] = []
    pending = [(root, 0)]
    while pending:
        folder, depth = pending.pop()
        entries = _entries(folder)
        if config := next((entry for entry in entries if entry.name == "config.yaml" and entry.is_file()), None):
            found.append((config.stat().st_mtime, folder))
        elif depth < MAX_DEPTH:
            # links deeper down may lead anywhere
            folders = (entry for entry in entries if entry.is_dir(follow_symlinks=depth < MAX_LINK_DEPTH))
            pending += [(Path(entry.path), depth + 1) for entry in folders if not entry.name.startswith(".")]
    return [RunDirectory.at(folder) for _, folder in sorted(found, reverse=True)]


def runs_of(typed: str, runs_dir: Path) -> list[RunDirectory]:
    """What a user means by a path, or by a name under ``runs_dir``: one run, or all runs of a sweep or folder.

    Raises:
        RunDirectoryError: no run is there.
    """
    for path in (Path(typed), runs_dir / typed):
        if runs := find_runs(path):
            return runs
    where = "it holds no run" if Path(typed).is_dir() else f"nothing is there, nor under {runs_dir}/"
    raise RunDirectoryError(f"{typed}: {where}; `python -m hpctrain status` lists the runs under {runs_dir}/")


def run_of(typed: str, runs_dir: Path) -> RunDirectory:
    """The one run that a user means.

    Raises:
        RunDirectoryError: no run is there, or several are.
    """
    runs = runs_of(typed, runs_dir)
    if len(runs) > 1:
        names = listed(sorted(os.path.relpath(run.path) for run in runs), shown=4)
        raise RunDirectoryError(f"{typed}: {len(runs)} runs are there, name one of them: {names}")
    return runs[0]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []

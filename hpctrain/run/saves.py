"""The saves that a program reported: ``saves.jsonl``, one record per save."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from hpctrain.files import LARGEST_LOG_BYTES, append_json_line, read_json_lines
from hpctrain.run.directory import RunDirectory
from hpctrain.run.record_fields import COUNT, PATH, TIME, decode

_PATH = replace(PATH, convert=Path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedSave:
    """One save of a program.

    Attributes:
        step: completed steps.
        path: of the file or folder that was saved, absolute.
        time: when it was reported, epoch seconds.
        attempt: that reported it.
    """

    step: Annotated[int, COUNT]
    path: Annotated[Path, _PATH]
    time: Annotated[float, TIME]
    attempt: Annotated[int, COUNT]


def record_save(directory: RunDirectory, attempt: int, step: int, path: Path) -> None:
    """Append a save, durably; a path in the run directory is kept relative to it, so that the run can be moved.

    Args:
        directory: of the run.
        attempt: that made it.
        step: completed steps.
        path: absolute.

    Raises:
        OSError: the record can't be written.
    """
    inside = path.is_relative_to(directory.path)
    stored_path = path.relative_to(directory.path) if inside else path
    record = {"step": step, "path": str(stored_path), "time": round(time.time(), 3), "attempt": attempt}
    append_json_line(directory.saves, record, durable=True)


def read_saves(directory: RunDirectory) -> list[ReportedSave]:
    """The reported saves in order; a record that can't be read is left out."""
    try:
        saves = [decode(ReportedSave, record) for record in read_json_lines(directory.saves, at_most=LARGEST_LOG_BYTES)]
    except OSError:
        return []
    return [replace(save, path=directory.path / save.path) for save in saves if save is not None]


def unreported_files(directory: RunDirectory) -> list[tuple[Path, float]]:
    """List the files and folders in the run's folder for checkpoints that were not reported, newest first.

    Returns:
        Each path, with the time of its last change in epoch seconds.
    """
    reported = {save.path for save in read_saves(directory)}
    changes = []
    with contextlib.suppress(OSError):  # no attempt has made the folder yet
        for path in directory.checkpoints.iterdir():
            inside = any(path in (save, *save.parents) for save in reported)
            if not inside and not path.name.startswith("."):
                changes.append((path, last_change(path)))
    return sorted(changes, key=lambda change: change[1], reverse=True)


def last_change(path: Path) -> float:
    """When a file, or the contents of a folder, changed last."""
    latest = 0.0
    for file in (path, *(path.rglob("*") if os.path.isdir(path) else ())):  # noqa: PTH112 - never raises
        with contextlib.suppress(OSError):  # removed meanwhile
            latest = max(latest, file.lstat().st_mtime)
    return latest


def last_save(directory: RunDirectory) -> ReportedSave | None:
    """The newest save that still exists; None without one."""
    # os.path.exists never raises, whatever a program has reported: a name that is too long, a folder of someone else
    return next((save for save in reversed(read_saves(directory)) if os.path.exists(save.path)), None)  # noqa: PTH110

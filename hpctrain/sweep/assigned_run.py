"""Prepare the run that a search has given to a task."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain.config.compose import Composer
from hpctrain.errors import RunDirectoryError
from hpctrain.launch.existing_run import changed_config
from hpctrain.launch.launch_code import SweepCode
from hpctrain.launch.prepare import RunPlan, prepare
from hpctrain.run.code import CodeSnapshot, current_code
from hpctrain.run.directory import RunDirectory
from hpctrain.run.manifest import manifest
from hpctrain.search.optuna_study import overrides_of
from hpctrain.search.record import SweepRecord
from hpctrain.search.search import Assignment
from hpctrain.sweep.runs import SweepRun
from hpctrain.sweep.sweep_run import sweep_run


def plan_assigned(home: RunDirectory, record: SweepRecord, assignment: Assignment) -> RunPlan:
    """Make the run's directory, if it has none, and store until which step it is to be trained.

    Args:
        home: the folder of the sweep.
        record: of the sweep.
        assignment: the run.

    Raises:
        ConfigError: the values that were drawn don't fit together.
        RunDirectoryError: the directory can't be written.
    """
    directory = RunDirectory.at(home.path / str(assignment.run))
    if not directory.config.is_file():
        if record.kind != "optuna":
            raise RunDirectoryError(f"{directory.path}: its config.yaml is gone; restore it, or remove the folder")
        # the task that began to make it was killed: the journal gave the number to this task alone
        shutil.rmtree(directory.path, ignore_errors=True)
        run = drawn_run(home, record, assignment)
        return prepare(
            replace(run.config, run_dir=str(directory.path)),
            record.command,
            run.varied,
            manifest(record.command, Path(record.folder)),
            report=_silent,
            code=SweepCode(home),
        )
    pause = "null" if assignment.pause_at_step is None else str(assignment.pause_at_step)
    changes = [] if record.kind == "optuna" else [f"trainer.pause_at_step={pause}"]
    return prepare(changed_config(directory, changes, None), record.command, report=_silent)


def drawn_run(home: RunDirectory, record: SweepRecord, assignment: Assignment) -> SweepRun:
    """Compose a run from the values that were drawn for it, with the configuration files that were submitted.

    Raises:
        ConfigError: the values don't fit together.
        RunDirectoryError: files of the copied code are missing.
    """
    code = current_code(home)
    if code is not None and (damage := code.find_damage()):
        raise RunDirectoryError(damage)
    folder = Path(record.folder) if code is None else code.working_directory
    composer = Composer(_in_copy(code, record.config_dir), folder)
    fixed = [override.partition("=")[0] for override in record.fixed]
    return sweep_run(composer, [*record.fixed, *_overrides(record, assignment)], fixed)


def _silent(line: str) -> None:
    """Print no line on a changed key: all that changes is the step of the pause, which the search decides."""


def _overrides(record: SweepRecord, assignment: Assignment) -> Sequence[str]:
    # a key that doesn't exist without the sweep was typed with a plus sign
    typed = {key.lstrip("+"): key for key in record.space}
    pairs = (override.partition("=") for override in overrides_of(assignment.drawn))
    return [f"{typed.get(key, key)}={value}" for key, _, value in pairs]


def _in_copy(code: CodeSnapshot | None, folder: str | None) -> str | None:
    """Return the copy of a folder; the folder itself if it wasn't copied."""
    if code is None or folder is None:
        return folder
    place = os.path.relpath(folder, code.root)
    copied = code.folder / place
    return str(copied) if not place.startswith("..") and copied.is_dir() else folder

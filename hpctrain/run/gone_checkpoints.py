"""Checkpoints that a run saved, by its records, and that are gone; and starting over from step 0."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from hpctrain.config.plain_yaml import read_plain_values
from hpctrain.files import read_json_or_empty, write_json
from hpctrain.run.checkpoints import saved_step
from hpctrain.run.directory import SET_ASIDE, RunDirectory
from hpctrain.run.ledger import Attempt, Ledger
from hpctrain.run.record_fields import COUNT

SAVED = "saved.json"
"""In an attempt's claim: the step of the newest checkpoint that it published. The ledger isn't enough: a killed attempt
writes no end, and its end may be recorded after the checkpoints were purged."""
STARTS_OVER = "starts_over"
"""In an attempt's claim: the user allows later attempts to start from step 0 if no checkpoint is left. Not a key of the
configuration, which each requeue would repeat: the file is void once a later attempt has started."""


def record_saved(claim: Path, step: int) -> None:
    """Record in an attempt's claim that the checkpoint of ``step`` is published; an error is ignored."""
    # the end record and the next attempt's start record have it as well
    with contextlib.suppress(OSError):
        write_json(claim / SAVED, {"step": step}, durable=False)


def recorded_step(directory: RunDirectory) -> int:
    """Return the step of the newest checkpoint that a training saved, by its records, even if it is gone; 0 if none.

    An attempt that started from an older checkpoint, or started over, voids the newer ones. 0 for a program, which
    keeps its own saves.
    """
    return _newest_record(directory)[0]


def may_start_over(directory: RunDirectory) -> bool:
    """Whether the user allows the next attempt to start from step 0."""
    return _newest_record(directory)[1]


def allow_start_over(directory: RunDirectory, attempt: int) -> None:
    """Allow the attempts after this one to start from step 0, until one of them has started.

    Raises:
        OSError: the file system's error.
    """
    if attempt:
        (directory.attempt(attempt) / STARTS_OVER).touch()


def _newest_record(directory: RunDirectory) -> tuple[int, bool]:
    """The step that the newest started attempt saved or started from, and whether the next one may start over."""
    attempts = {attempt.attempt: attempt for attempt in Ledger(directory).attempts()}
    for number in sorted({*attempts, *directory.claimed_attempts()}, reverse=True):
        if (directory.attempt(number) / STARTS_OVER).exists():
            return 0, True
        saved = read_json_or_empty(directory.attempt(number) / SAVED).get("step")
        attempt = attempts.get(number, Attempt(attempt=number))
        # attempts of earlier versions recorded only what was there when they ended
        steps = [attempt.start_step, attempt.saved_step, saved if COUNT.accepts(saved) else None]
        if attempt.start_step is not None or steps[-1] is not None:
            step = max(step for step in steps if step is not None)
            is_program = step > 0 and "run" in read_plain_values(directory.config, ("run",))
            return (0 if is_program else step), False
    return 0, False


def gone_step(directory: RunDirectory) -> int | None:
    """Return the step of the newest recorded checkpoint if it is gone; None if it is there, even if damaged."""
    # before the folder is listed, since the run may be saving
    recorded = recorded_step(directory)
    if not recorded or any(step >= recorded for step in directory.checkpoint_steps()):
        return None
    aside = (SET_ASIDE.fullmatch(path.name) for path in directory.set_aside())
    steps = {*directory.moved_aside(), *(int(match["step"]) for match in aside if match is not None)}
    return None if recorded in steps else recorded


def describe_gone(directory: RunDirectory) -> str:
    """Describe that all checkpoints that a run saved are gone, and what to do; empty if they aren't.

    Only names and sizes of files are compared.
    """
    recorded = recorded_step(directory)
    if not recorded or saved_step(directory):
        return ""
    return (
        f"{directory.checkpoints}: expected the checkpoint of step {recorded}, which the run saved, or an older "
        f"one, but none is complete; restore one from a copy, or train from step 0 again: `python -m hpctrain resume "
        f"{directory.as_typed} resume.from_scratch=true`, which moves the metrics so far to {directory.earlier}"
    )


def move_records_aside(directory: RunDirectory, attempt: int) -> Path:
    """Move the records of earlier attempts out of the way of one that starts from step 0.

    Args:
        directory: of the run.
        attempt: that starts over.

    Returns:
        The folder with the records.

    Raises:
        OSError: the file system's error.
    """
    folder = _folder(directory, attempt)
    for path in (*_records(directory), directory.tensorboard, directory.metrics_csv, directory.sync):
        if os.path.lexists(path):
            path.rename(folder / path.name)
    return folder


def copy_records_aside(directory: RunDirectory, attempt: int) -> Path:
    """Copy the records that a resume from an older checkpoint is about to drop; see `move_records_aside`."""
    folder = _folder(directory, attempt)
    for path in _records(directory):
        if path.is_dir():
            shutil.copytree(path, folder / path.name, copy_function=_link_or_copy, dirs_exist_ok=True)
        elif path.exists():
            shutil.copy2(path, folder / path.name)
    return folder


def _folder(directory: RunDirectory, attempt: int) -> Path:
    folder = directory.earlier / f"{attempt:04d}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _records(directory: RunDirectory) -> list[Path]:
    samples = directory.logs.glob(directory.sample_log("*").name)
    return [directory.metrics, directory.media_records, directory.media, *samples]


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)

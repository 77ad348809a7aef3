"""Disk space for checkpoints: how much a run needs, and what can be removed if its file system has too little."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoint.retention import ALWAYS_KEPT
from hpctrain.config.checkpoint import Checkpoint
from hpctrain.errors import HpctrainError
from hpctrain.files import read_json_or_empty
from hpctrain.phrases import all_of, counted, listed, scaled
from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.run.directory import RunDirectory
from hpctrain.run.file_system import FULL, FileSystem, limit_met
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason

FILES = 5
"""Files of a checkpoint, including its folder, while the run has no checkpoint in which to count them."""
SHOWN = 5
"""Number of folders that a message names; it only counts the others."""
KEEP_FEWER = "checkpoint.keep, checkpoint.keep_every and checkpoint.keep_best decide how many are kept"


@dataclass(frozen=True, slots=True)
class Removable:
    """A folder that no run needs in order to continue.

    Attributes:
        path: of a checkpoint, or of all checkpoints of a completed run.
        bytes: of its files.
    """

    path: Path
    bytes: int


def shortage(directory: RunDirectory, step: int, checkpoint_bytes: int, policy: Checkpoint) -> str:
    """Describe why the file system won't have room for the checkpoints of a run; empty if it has, as far as known.

    Nothing is reserved to find that out: for that moment, another run's save would fail. Therefore a quota counts only
    if statvfs(2) of the file system takes it into account.

    Args:
        directory: of the run.
        step: of the checkpoint that is about to be written.
        checkpoint_bytes: of each.
        policy: conf/checkpoint.
    """
    with suppress(OSError):
        system = FileSystem.of(directory.checkpoints)
        # until the first one is removed; those that keep_every keeps have no bound
        steps = directory.checkpoint_steps()
        count = max(1, max_checkpoints(policy) - len(steps))
        # of each; the folder counts as well
        num_files = 1 + len(os.listdir(directory.checkpoint(steps[-1]))) if steps else FILES  # noqa: PTH208 - names
        kept = [f"checkpoint.keep={policy.keep}"]
        kept += [f"checkpoint.keep_best={policy.keep_best}"] if policy.keep_best else []
        each = f"{counted(num_files, 'file')} and {_size(checkpoint_bytes)}"
        why = f"{count} more checkpoints of {each}" if count > 1 else f"a checkpoint of {each}"
        why += f" ({all_of([*kept, 'one while it is written'])})"
        if system.free_files is not None and system.free_files < count * num_files:
            problem = f"{system.describe_free()}; {count * num_files} files are needed: {why}"
            fits = system.free_files >= num_files and system.free_bytes >= checkpoint_bytes
        elif system.free_bytes < count * checkpoint_bytes:
            problem = f"{_size(system.free_bytes)} are free, but {_size(count * checkpoint_bytes)} are needed: {why}"
            fits = system.free_bytes >= checkpoint_bytes
        else:
            return ""
        outlook = f"the checkpoint of step {step} {'still fits' if fits else 'will not fit'}"
        return f"{directory.checkpoints}: {problem}; {outlook}; {advice(directory)}"
    return ""


def max_checkpoints(policy: Checkpoint) -> int:
    """The most checkpoints of a run on disk at once, including the one being written, without those of `keep_every`."""
    return max(policy.keep, ALWAYS_KEPT) + (policy.keep_best or 0) + 1


def describe_disk_space(directory: RunDirectory, checkpoint_bytes: int, policy: Checkpoint) -> str:
    """Describe the disk space that the checkpoints of a run and of its sweep take, for the start of the log.

    Args:
        directory: of the run.
        checkpoint_bytes: of each.
        policy: conf/checkpoint.
    """
    count, keep_best = max_checkpoints(policy), policy.keep_best or 0
    text = f"at most {count} x {_size(checkpoint_bytes)} = {_size(count * checkpoint_bytes)}"
    if keep_best:
        text += f", {_size(keep_best * checkpoint_bytes)} of it for the best"
    if (num_runs := _num_runs_of_the_sweep(directory)) > 1:
        text += f"; {_size(num_runs * count * checkpoint_bytes)} for the {num_runs} runs of the sweep"
    with suppress(OSError):
        text += f"; {_size(FileSystem.of(directory.checkpoints).free_bytes)} are free"
    return text + ("" if policy.keep_every is None else "; those of checkpoint.keep_every come on top")


def is_full(error: Exception) -> bool:
    """Whether a save failed for want of room; the error may be that of another rank, or of another library."""
    return getattr(error, "errno", None) in FULL or any(os.strerror(number) in str(error) for number in FULL)


def after_full(directory: RunDirectory, error: Exception, temporary: Path | None = None) -> str:
    """Describe the limit that a failed save has met, what is free without its files, and what can be removed.

    Args:
        directory: of the run.
        error: for which `is_full` is true.
        temporary: the files of the save, which are removed.
    """
    # before they are removed, since the files may be what has run out; the bytes are those without them
    limit = limit_met(error, directory.checkpoints)
    if temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)
    with suppress(OSError):
        limit += f"; without the new checkpoint, {FileSystem.of(directory.checkpoints).describe_free()}"
    return f"{limit}; {advice(directory)}"


def advice(directory: RunDirectory) -> str:
    """Name the checkpoints that can be removed, the largest first, and the keys that make a run keep fewer."""
    found = removable(directory)
    if not found:
        return f"no older checkpoint of the run can be removed: remove other files; {KEEP_FEWER}"
    names = listed((f"{one.path} ({_size(one.bytes)})" for one in found), shown=SHOWN)
    return f"older checkpoints, the largest first, of which you may remove what you don't need: {names}; {KEEP_FEWER}"


def removable(directory: RunDirectory) -> list[Removable]:
    """Return checkpoints that no run needs in order to continue, the largest first; some may be wanted as results.

    These are older checkpoints of the run, those that a resume has set aside, and all checkpoints of the completed runs
    of the same sweep.

    Args:
        directory: of the run.
    """
    found: list[Removable] = []
    with suppress(OSError, HpctrainError):
        known = list_checkpoints(directory, verify=False)
        newest = [info.step for info in known if info.intact][-ALWAYS_KEPT:]
        found += [Removable(info.path, info.bytes) for info in known if newest and info.step < newest[0]]
    with suppress(OSError):
        found += [Removable(path, _bytes_in(path)) for path in directory.set_aside()]
    for other in _others_of_the_sweep(directory):
        with suppress(OSError, HpctrainError):
            attempts = Ledger(other).attempts()
            if attempts and attempts[-1].reason is Reason.COMPLETED:
                steps = other.checkpoint_steps()
                found.append(Removable(other.checkpoints, sum(_bytes_in(other.checkpoint(step)) for step in steps)))
    return sorted((one for one in found if one.bytes), key=lambda one: (-one.bytes, one.path))


def _others_of_the_sweep(directory: RunDirectory) -> list[RunDirectory]:
    home = RunDirectory(directory.path.parent)
    with suppress(OSError):
        if home.sweep.is_file():
            others = [RunDirectory(path) for path in home.path.iterdir() if path != directory.path]
            return [other for other in others if other.config.is_file()]
    return []


def _num_runs_of_the_sweep(directory: RunDirectory) -> int:
    """The number of runs of the run's sweep, including those not drawn yet; 0 without a sweep."""
    home = RunDirectory(directory.path.parent)
    with suppress(OSError):
        if home.sweep.is_file():
            drawn = sum(name.isdecimal() for name in os.listdir(home.path))  # noqa: PTH208 - names
            planned = read_json_or_empty(home.sweep).get("num_runs")
            return max(drawn, planned) if isinstance(planned, int) else drawn
    return 0


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def _size(count: int) -> str:
    return scaled(count, "B")

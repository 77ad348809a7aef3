"""Room for checkpoints: how much a run needs, and what can be removed if its file system has too little."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoint.retention import ALWAYS_KEPT
from hpctrain.config.checkpoint import Checkpoint
from hpctrain.errors import HpctrainError
from hpctrain.files import read_json_or_empty
from hpctrain.phrases import all_of, listed, scaled
from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.run.directory import RunDirectory
from hpctrain.run.disk_reserve import FULL
from hpctrain.run.file_system import FileSystem
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason

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
        free = FileSystem.of(directory.checkpoints).free_bytes
        # until the first one is removed; those that keep_every keeps have no bound
        count = max(1, most_at_once(policy) - len(directory.checkpoint_steps()))
        needed = count * checkpoint_bytes
        if free >= needed:
            return ""
        kept = [f"checkpoint.keep={policy.keep}"]
        kept += [f"checkpoint.keep_best={policy.keep_best}"] if policy.keep_best else []
        why = f"{count} more checkpoints of {_size(checkpoint_bytes)}" if count > 1 else "a checkpoint"
        why += f" ({all_of([*kept, 'one while it is written'])})"
        fits = "still fits" if free >= checkpoint_bytes else "won't fit"
        problem = f"{_size(free)} are free, but {_size(needed)} are needed: {why}"
        return f"{directory.checkpoints}: {problem}; the checkpoint of step {step} {fits}; {advice(directory)}"
    return ""


def most_at_once(policy: Checkpoint) -> int:
    """The most checkpoints of a run at once, the one that is being written included; without those of `keep_every`."""
    return max(policy.keep, ALWAYS_KEPT) + (policy.keep_best or 0) + 1


def describe_need(directory: RunDirectory, checkpoint_bytes: int, policy: Checkpoint) -> str:
    """Describe the room for the checkpoints of a run, and of its sweep, for the log of an attempt's start.

    Args:
        directory: of the run.
        checkpoint_bytes: of each.
        policy: conf/checkpoint.
    """
    most, keep_best = most_at_once(policy), policy.keep_best or 0
    text = f"at most {most} x {_size(checkpoint_bytes)} = {_size(most * checkpoint_bytes)}"
    if keep_best:
        text += f", {_size(keep_best * checkpoint_bytes)} of it for the best"
    if (num_runs := _num_runs_of_the_sweep(directory)) > 1:
        text += f"; {_size(num_runs * most * checkpoint_bytes)} for the {num_runs} runs of the sweep"
    with suppress(OSError):
        text += f"; {_size(FileSystem.of(directory.checkpoints).free_bytes)} are free"
    return text + ("" if policy.keep_every is None else "; those of checkpoint.keep_every come on top")


def is_full(error: Exception) -> bool:
    """Whether a save failed for want of room; the error may be that of another rank, or of another library."""
    return getattr(error, "errno", None) in FULL or any(os.strerror(number) in str(error) for number in FULL)


def after_full(directory: RunDirectory, error: Exception) -> str:
    """What is free after a save failed for want of room, and what can be removed.

    Args:
        directory: of the run.
        error: for which `is_full` is true.
    """
    found = []
    with suppress(OSError):
        system = FileSystem.of(directory.checkpoints)
        found.append(f"{_size(system.free_bytes)} are free")
        if os.strerror(errno.EDQUOT) in str(error):
            found.append(f"`{system.quota_command(directory.checkpoints)}` shows your quota")
    return "; ".join([*found, advice(directory)])


def advice(directory: RunDirectory) -> str:
    """What can be removed, the largest first, and which keys make a run keep less."""
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
    """The number of runs of the run's sweep, those that a search has yet to draw included; 0 without a sweep."""
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

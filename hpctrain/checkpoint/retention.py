"""Retention of checkpoints: the policy, the disk space that they take, and the removal of the others.

A crash never leaves a part of a checkpoint visible.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hpctrain.config.checkpoint import Checkpoint
from hpctrain.errors import CheckpointDamagedError, HpctrainError
from hpctrain.files import TEMPORARY_PREFIX, fsync_directory, read_json_or_empty, temporary_name
from hpctrain.phrases import all_of, counted, listed, scaled
from hpctrain.run.checkpoint_manifest import MANIFEST, is_known_name, read_manifest
from hpctrain.run.checkpoints import CheckpointInfo, find_damage, list_checkpoints
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import best_steps
from hpctrain.run.file_system import FULL, FileSystem, limit_met
from hpctrain.run.ledger import Claim, Ledger
from hpctrain.run.reason import Reason

log = logging.getLogger("hpctrain.checkpoint")

ALWAYS_KEPT = 2
"""Number of newest intact checkpoints that every policy keeps."""
QUARANTINE_SIZE = 2
"""Number of damaged checkpoints, of the newest steps, that are kept once a resume has set them aside."""
FILES = 5
"""Files of a checkpoint, including its folder, while the run has no checkpoint in which to count them."""
SHOWN = 5
"""Number of folders that a message names; it only counts the others."""
KEEP_FEWER = "checkpoint.keep, checkpoint.keep_every and checkpoint.keep_best decide how many are kept"

_REMOVED = "removed-"
_REPLACED = "replaced-"
_LEFTOVER = re.compile(
    rf"{re.escape(TEMPORARY_PREFIX)}(?P<kind>{_REMOVED}|{_REPLACED})?(?P<name>step_\d{{8,}})-[0-9a-f]{{8}}"
)


def steps_to_remove(checkpoints: Sequence[CheckpointInfo], policy: Checkpoint) -> list[int]:
    """Return the steps whose checkpoints may be removed, oldest first.

    Damaged ones stay as evidence until the newest `ALWAYS_KEPT` intact ones are all newer. A checkpoint without a
    readable manifest can't be shown to be hpctrain's, and stays for good.

    Args:
        checkpoints: in any order.
        policy: conf/checkpoint, which keeps at least `ALWAYS_KEPT` intact ones.
    """
    intact = sorted((info.step for info in checkpoints if info.intact), reverse=True)
    keep = set(intact[: policy.keep])
    if policy.keep_every is not None:
        keep.update(step for step in intact if step % policy.keep_every == 0)
    keep.update(best_steps({info.step: info.score for info in checkpoints if info.intact}, policy.keep_best or 0))
    overtaken = intact[ALWAYS_KEPT - 1] if len(intact) >= ALWAYS_KEPT else -1
    damaged = [info.step for info in checkpoints if not info.intact and info.weights_digest is not None]
    return sorted([step for step in intact if step not in keep] + [step for step in damaged if step < overtaken])


class Retention:
    """Removes the checkpoints of a run that the policy no longer keeps. Only rank zero uses it.

    Args:
        directory: of the run.
        claim: of this attempt, checked before each removal.
        policy: conf/checkpoint.
    """

    def __init__(self, directory: RunDirectory, claim: Claim, policy: Checkpoint) -> None:
        self._directory = directory
        self._claim = claim
        self._policy = policy
        self._damage: dict[int, str] = {}
        # the writing thread and the one that cleans up after an earlier attempt run side by side
        self._lock = threading.Lock()

    def apply(self, intact: int) -> None:
        """Remove the checkpoints that the policy no longer keeps; a failed removal is logged.

        Args:
            intact: the step of a checkpoint that was just written or verified, and isn't read back again.

        Raises:
            SupersededError: a later attempt owns the run.
        """
        with self._lock:
            try:
                for step in self._steps_to_remove(intact):
                    self._claim.require_ownership()
                    remove_checkpoint(self._directory.checkpoint(step))
                    self._damage.pop(step, None)
                for path in self._directory.set_aside()[:-QUARANTINE_SIZE]:
                    self._claim.require_ownership()
                    # the manifest may be what is damaged: then the names of the files show that none is a user's
                    if holds_only_our_files(path) or all(is_known_name(entry.name) for entry in path.iterdir()):
                        _remove(path)
            except OSError as error:
                log.warning("old checkpoints can't be removed: %s", error)

    def _steps_to_remove(self, intact: int) -> list[int]:
        """Return the steps to remove, after verifying the checkpoints that stay, each once."""
        self._damage.pop(intact, None)
        checkpoints = {info.step: info for info in list_checkpoints(self._directory, verify=False)}
        while True:
            steps = steps_to_remove(list(checkpoints.values()), self._policy)
            stay = [
                info for step, info in sorted(checkpoints.items(), reverse=True) if info.intact and step not in steps
            ]
            unverified = [info for info in stay[:ALWAYS_KEPT] if steps and info.step != intact]
            damaged = [info for info in unverified if self._damage_of(info)]
            if not damaged:
                return steps
            # apply the policy again without the damaged ones
            for info in damaged:
                problem = self._damage_of(info)
                log.warning("%s is not intact (%s): an older one is kept instead", info.path, problem)
                checkpoints[info.step] = replace(info, intact=False, problem=problem)

    def _damage_of(self, info: CheckpointInfo) -> str:
        if info.step not in self._damage:
            self._damage[info.step] = find_damage(info.path)
        return self._damage[info.step]


def holds_only_our_files(path: Path) -> bool:
    """Return whether the directory at ``path`` holds a checkpoint of hpctrain, and no file that a user added."""
    if path.is_symlink():
        return False
    try:
        our_names = {MANIFEST, *read_manifest(path)["files"]}
    except CheckpointDamagedError:
        return False
    # NFS keeps a removed file that is still open under such a name
    return all(entry.name in our_names or entry.name.startswith(".nfs") for entry in path.iterdir())


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint that hpctrain wrote, in one rename; one that a user put a file into stays.

    Raises:
        OSError: a file can't be removed; `remove_leftovers` removes the rest when the next attempt starts.
    """
    if not holds_only_our_files(path):
        log.warning("keeping %s: it contains files that hpctrain did not write", path)
        return
    _remove(path)


def move_replaced(path: Path) -> Path:
    """Move a checkpoint out of the way of a new one of the same step, for `discard_replaced` or `remove_leftovers`."""
    aside = temporary_name(path.with_name(_REPLACED + path.name))
    path.rename(aside)
    return aside


def discard_replaced(aside: Path) -> None:
    """Remove the checkpoint that `move_replaced` moved; keep it under another name if it contains a user's files.

    Raises:
        OSError: a file can't be removed.
    """
    if holds_only_our_files(aside):
        _remove(aside)
        return
    new_path = aside.with_name(aside.name.removeprefix(TEMPORARY_PREFIX))
    aside.rename(new_path)
    log.warning("%s was replaced by a new checkpoint, but contains a user's files: moved to %s", aside, new_path)


def quarantine(passed_over: Sequence[CheckpointInfo], claim: Claim) -> None:
    """Rename damaged checkpoints that a resume passed over: they stay for inspection, and no longer count as saved.

    One that merely couldn't be read stays where it is. A failed renaming is logged.

    Raises:
        SupersededError: a later attempt owns the run.
    """
    for info in passed_over:
        # a symbolic link is the user's own
        if not info.damaged or info.path.is_symlink():
            continue
        claim.require_ownership()
        aside = info.path.with_name(f"damaged-{info.path.name}-{secrets.token_hex(4)}")
        try:
            info.path.rename(aside)
            fsync_directory(aside.parent)
        except OSError as error:
            log.warning("%s is damaged and can't be set aside: %s", info.path, error.strerror)
        else:
            log.warning("%s is damaged (%s): set aside as %s", info.path, info.problem, aside.name)


def remove_leftovers(directory: RunDirectory) -> list[str]:
    """Clean up the temporary names of dead attempts; rank zero calls it when an attempt starts.

    A checkpoint that was moved aside for a new one is put back if the new one was never published. A failed removal is
    logged. Names that hpctrain doesn't use are not touched.

    Returns:
        The names that were removed or put back.
    """
    if not directory.checkpoints.is_dir():
        return []
    done = []
    for path in sorted(directory.checkpoints.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or path.is_symlink():
            continue
        final = path.with_name(match["name"])
        try:
            if match["kind"] != _REPLACED:
                shutil.rmtree(path)
            elif final.exists():
                discard_replaced(path)
            else:
                path.rename(final)
        except OSError as error:
            log.warning("%s was left by an earlier attempt and can't be removed: %s", path, error.strerror)
            continue
        done.append(path.name)
    return done


def _remove(path: Path) -> None:
    """Remove a checkpoint, which is renamed first, so that a partly removed one never looks complete."""
    step = re.search(r"step_\d+", path.name)
    assert step is not None, path
    condemned = temporary_name(path.with_name(_REMOVED + step[0]))
    path.rename(condemned)
    fsync_directory(path.parent)
    shutil.rmtree(condemned)


class Removable(NamedTuple):
    """A folder that no run needs in order to continue.

    Attributes:
        path: of a checkpoint, or of all checkpoints of a completed run.
        num_bytes: of its files.
    """

    path: Path
    num_bytes: int


def describe_shortage(directory: RunDirectory, step: int, checkpoint_bytes: int, policy: Checkpoint) -> str:
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
        reasons = [f"checkpoint.keep={policy.keep}"]
        reasons += [f"checkpoint.keep_best={policy.keep_best}"] if policy.keep_best else []
        size = f"{counted(num_files, 'file')} and {_size(checkpoint_bytes)}"
        why = f"{count} more checkpoints of {size}" if count > 1 else f"a checkpoint of {size}"
        why += f" ({all_of([*reasons, 'one while it is written'])})"
        if system.free_files is not None and system.free_files < count * num_files:
            problem = f"{system.describe_free()}; {count * num_files} files are needed: {why}"
            fits = system.free_files >= num_files and system.free_bytes >= checkpoint_bytes
        elif system.free_bytes < count * checkpoint_bytes:
            problem = f"{_size(system.free_bytes)} are free, but {_size(count * checkpoint_bytes)} are needed: {why}"
            fits = system.free_bytes >= checkpoint_bytes
        else:
            return ""
        outlook = f"the checkpoint of step {step} {'still fits' if fits else 'will not fit'}"
        return f"{directory.checkpoints}: {problem}; {outlook}; {removal_advice(directory)}"
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


def explain_full(directory: RunDirectory, error: Exception, temporary: Path | None = None) -> str:
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
    return f"{limit}; {removal_advice(directory)}"


def removal_advice(directory: RunDirectory) -> str:
    """Name the checkpoints that can be removed, the largest first, and the keys that make a run keep fewer."""
    folders = removable_folders(directory)
    if not folders:
        return f"no older checkpoint of the run can be removed: remove other files; {KEEP_FEWER}"
    names = listed((f"{folder.path} ({_size(folder.num_bytes)})" for folder in folders), max_names=SHOWN)
    return f"older checkpoints, the largest first, of which you may remove what you don't need: {names}; {KEEP_FEWER}"


def removable_folders(directory: RunDirectory) -> list[Removable]:
    """Return checkpoints that no run needs in order to continue, the largest first; some may be wanted as results.

    These are older checkpoints of the run, those that a resume has set aside, and all checkpoints of the completed runs
    of the same sweep.

    Args:
        directory: of the run.
    """
    folders: list[Removable] = []
    with suppress(OSError, HpctrainError):
        checkpoints = list_checkpoints(directory, verify=False)
        newest = [info.step for info in checkpoints if info.intact][-ALWAYS_KEPT:]
        folders += [Removable(info.path, info.bytes) for info in checkpoints if newest and info.step < newest[0]]
    with suppress(OSError):
        folders += [Removable(path, _bytes_in(path)) for path in directory.set_aside()]
    for run in _other_runs_of_the_sweep(directory):
        with suppress(OSError, HpctrainError):
            attempts = Ledger(run).attempts()
            if attempts and attempts[-1].reason is Reason.COMPLETED:
                steps = run.checkpoint_steps()
                folders.append(Removable(run.checkpoints, sum(_bytes_in(run.checkpoint(step)) for step in steps)))
    return sorted(
        (folder for folder in folders if folder.num_bytes), key=lambda folder: (-folder.num_bytes, folder.path)
    )


def _other_runs_of_the_sweep(directory: RunDirectory) -> list[RunDirectory]:
    home = RunDirectory(directory.path.parent)
    with suppress(OSError):
        if home.sweep.is_file():
            runs = [RunDirectory(path) for path in home.path.iterdir() if path != directory.path]
            return [run for run in runs if run.config.is_file()]
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

"""Checkpoints on disk: listed, compared with their manifests, and the best of them; without torch.

The format is in docs/reference/checkpoint_format.md.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

import xxhash

from hpctrain.config.plain_yaml import read_plain_values
from hpctrain.errors import CheckpointDamagedError, CheckpointError
from hpctrain.run.checkpoint_manifest import (
    ALGORITHM,
    MANIFEST,
    SHARDED_VERSION,
    ManifestUnreadableError,
    OtherVersionError,
    read_manifest,
)
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import Score, best_steps, read_evaluation
from hpctrain.run.record_fields import decode
from hpctrain.run.saves import last_save

ShowRead: TypeAlias = Callable[[int, int], None]
"""Called while a checkpoint is read, by several threads in turn: bytes that are read, and bytes in all."""
_CHUNK_BYTES = 1 << 20
_READERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One published checkpoint; fields that only its manifest records are None if that can't be read.

    Attributes:
        step: completed steps, from the directory's name.
        path: its directory.
        intact: complete, and checksums match; without verification: complete, and sizes match.
        problem: why it isn't intact, or empty.
        unreadable: whether the file system failed to read it, perhaps only for a while.
        other_version: whether its format is one that this version of hpctrain can't read.
        samples_seen: over all ranks, since the start of the run.
        world_size: of the attempt that wrote it.
        weights_digest: of the model's named tensors: SHA-256, or sums (`sum128:`) if each rank wrote a part.
        time: when it was written, epoch seconds.
        config_digest: of the configuration under which it was written.
        score: of the evaluation of its step; None without one.
    """

    step: int
    path: Path
    intact: bool
    problem: str
    unreadable: bool = False
    other_version: bool = False
    samples_seen: int | None = None
    world_size: int | None = None
    weights_digest: str | None = None
    time: float | None = None
    config_digest: str | None = None
    score: Score | None = None

    @property
    def damaged(self) -> bool:
        """Whether its bytes are known to be wrong."""
        return not (self.intact or self.unreadable or self.other_version)

    @property
    def bytes(self) -> int:
        """The size of its files, which is read from the file system when asked for; 0 if that fails."""
        try:
            return sum(file.stat().st_size for file in self.path.iterdir() if file.is_file())
        except OSError:
            return 0


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with a file of a checkpoint.

    Attributes:
        text: in a phrase.
        unreadable: whether the file system failed to read it.
    """

    text: str
    unreadable: bool = False


Verify: TypeAlias = Callable[[Path, Mapping[str, Any], ShowRead | None], list[Problem]]
"""Compares files of a checkpoint with their entries in its manifest; returns what is wrong."""


def file_checksum(path: Path, on_read: Callable[[int], None] | None = None) -> str:
    """Return the checksum of a file's bytes, in hexadecimal.

    Args:
        path: of the file.
        on_read: called with the number of bytes after each read.
    """
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if on_read is not None:
                on_read(count)
    return digest.hexdigest()


def find_damage(path: Path) -> str:
    """Read the whole checkpoint at ``path``, compare it with its manifest, and describe the first problem.

    Args:
        path: its directory.

    Returns:
        The problem; empty if the checkpoint is intact.
    """
    try:
        files = read_manifest(path)["files"]
    except CheckpointDamagedError as error:
        return str(error)
    return _joined(wrong_files(path, files, verify=True))


def list_checkpoints(directory: RunDirectory, *, verify: bool = True) -> list[CheckpointInfo]:
    """Return all published checkpoints of a run, oldest first.

    Args:
        directory: of the run.
        verify: read every byte and compare checksums; False compares only names and sizes.
    """
    checkpoints = [_describe(directory.checkpoint(step), step, verify=verify) for step in directory.checkpoint_steps()]
    return [info for info in checkpoints if info.intact or _still_there(info)]


def saved_step(directory: RunDirectory) -> int:
    """Return the step of the newest checkpoint that is complete; 0 without one. Only names and sizes are compared.

    A checkpoint that the file system fails to read counts: otherwise a brief failure would look like lost steps. Of a
    program, the newest save counts that it reported and that still exists.
    """
    # a kill between the two renames that replace a checkpoint has left the old one there
    aside = directory.moved_aside()
    for step in sorted({*aside, *directory.checkpoint_steps()}, reverse=True):
        if is_complete(aside.get(step, directory.checkpoint(step)), step):
            return step
    save = last_save(directory)
    return 0 if save is None else save.step


def newest_intact(
    directory: RunDirectory, show: ShowRead | None = None, verify: Verify | None = None
) -> tuple[CheckpointInfo | None, list[CheckpointInfo]]:
    """Return the newest intact checkpoint of a run, and the newer ones that are not intact, newest first.

    Each is read in full and compared with the checksums of its manifest, and older ones are not read. The first is None
    if no checkpoint is intact.

    Args:
        directory: of the run.
        show: called while a checkpoint is read.
        verify: compares the files of checkpoints of which each rank wrote a part; None if this process does.
    """
    damaged: list[CheckpointInfo] = []
    for step in reversed(directory.checkpoint_steps()):
        info = _describe(directory.checkpoint(step), step, verify=True, show=show, verify_parts=verify)
        if info.intact:
            return info, damaged
        if _still_there(info):
            damaged.append(info)
    return None, damaged


def _describe(
    path: Path, step: int, *, verify: bool, show: ShowRead | None = None, verify_parts: Verify | None = None
) -> CheckpointInfo:
    try:
        manifest = read_manifest(path)
    except CheckpointDamagedError as error:
        return CheckpointInfo(
            step=step,
            path=path,
            intact=False,
            problem=str(error),
            unreadable=isinstance(error, ManifestUnreadableError),
            other_version=isinstance(error, OtherVersionError),
        )
    if manifest["step"] != step:
        problems = [Problem(f"{MANIFEST} belongs to step {manifest['step']}")]
    elif verify and verify_parts is not None and manifest["format_version"] == SHARDED_VERSION:
        problems = verify_parts(path, manifest["files"], show)
    else:
        problems = wrong_files(path, manifest["files"], verify=verify, show=show)
    return CheckpointInfo(
        step=step,
        path=path,
        intact=not problems,
        problem=_joined(problems),
        unreadable=any(problem.unreadable for problem in problems),
        samples_seen=manifest["samples_seen"],
        world_size=manifest["world_size"],
        weights_digest=manifest["weights_digest"],
        time=manifest["time"],
        config_digest=manifest["config_digest"],
        score=decode(Score, manifest.get("score")),
    )


def is_complete(path: Path, step: int) -> bool:
    """Whether a step's checkpoint is there by names and sizes; one that the file system fails to read counts."""
    info = _describe(path, step, verify=False)
    return info.intact or info.unreadable


def _still_there(info: CheckpointInfo) -> bool:
    # a checkpoint that the running attempt removed while it was read isn't damaged
    return os.path.lexists(info.path)


def _joined(problems: Sequence[Problem]) -> str:
    return "; ".join(problem.text for problem in problems)


def wrong_files(
    path: Path, files: Mapping[str, Any], *, verify: bool = True, show: ShowRead | None = None
) -> list[Problem]:
    """Compare files of the checkpoint at ``path`` with their entries in its manifest, and return what is wrong.

    Args:
        path: its directory.
        files: entries by name.
        verify: read every byte and compare checksums; False compares only sizes.
        show: called while the files are read.
    """
    # sizes first: a truncated file need not be read
    wrong = [_wrong_size(path / name, entry["bytes"]) for name, entry in files.items()]
    if verify and not any(wrong):
        on_read = None if show is None else _adding_up(show, sum(entry["bytes"] for entry in files.values()))
        with ThreadPoolExecutor(min(_READERS, len(files)) or 1) as readers:
            wrong = list(
                readers.map(lambda name: _wrong_checksum(path / name, files[name]["checksum"], on_read), files)
            )
    return [problem for problem in wrong if problem is not None]


def _adding_up(show: ShowRead, total: int) -> Callable[[int], None]:
    """Return a function that several threads can call with the bytes that they read."""
    lock, done = Lock(), 0

    def add(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            show(done, total)

    return add


def _wrong_size(file: Path, expected: int) -> Problem | None:
    try:
        status = file.stat()
    except FileNotFoundError:
        return Problem(f"{file.name} is missing")
    except OSError as error:
        return _unreadable(file, error)
    if not stat.S_ISREG(status.st_mode):
        return Problem(f"{file.name} is not a regular file")
    if status.st_size != expected:
        return Problem(f"{file.name} has {status.st_size} bytes instead of {expected}")
    return None


def _wrong_checksum(file: Path, expected: str, on_read: Callable[[int], None] | None) -> Problem | None:
    try:
        checksum = file_checksum(file, on_read)
    except OSError as error:
        return _unreadable(file, error)
    if checksum == expected:
        return None
    return Problem(f"{file.name} doesn't match its checksum ({ALGORITHM} {expected}, found {checksum})")


def _unreadable(file: Path, error: OSError) -> Problem:
    return Problem(f"{file.name} can't be read: {error.strerror}", unreadable=True)


KEEP_BEST = "checkpoint.keep_best"


@dataclass(frozen=True, slots=True)
class BestCheckpoint:
    """The best of a run's checkpoints.

    If a better evaluation has no checkpoint, that is a warning: scripts of runs with keep_best=0 use the best on disk.

    Attributes:
        info: the checkpoint with the best score; None if none has a score.
        warning: if the checkpoint of the best evaluation isn't on disk, a line on that; else empty.
    """

    info: CheckpointInfo | None
    warning: str

    @classmethod
    def of(cls, directory: RunDirectory, checkpoints: Sequence[CheckpointInfo] | None = None) -> BestCheckpoint:
        """Find the best checkpoint of a run.

        Args:
            directory: of the run.
            checkpoints: of the run, if the caller has listed them already.
        """
        if checkpoints is None:
            checkpoints = list_checkpoints(directory, verify=False)
        scored = {info.step: info for info in checkpoints if info.intact}
        steps = best_steps({step: info.score for step, info in scored.items()}, 1)
        best = scored[steps[0]] if steps else None
        evaluation = directory.newest(read_evaluation)
        top = None if evaluation is None else evaluation.best
        if evaluation is None or top is None or (best is not None and _is_best(best, top, evaluation.best_step)):
            return cls(best, "")
        on_disk = "no checkpoint has a score" if best is None else f"the best checkpoint on disk is {_described(best)}"
        policy = read_plain_values(directory.config, (KEEP_BEST,)).get(KEEP_BEST)
        advice = f" ({KEEP_BEST}=0; set it to 1 to keep the best)" if policy == 0 else ""
        at = f"{top.name} {top.value:.6g} at step {evaluation.best_step}"
        is_damaged = any(info.step == evaluation.best_step for info in checkpoints)
        lacks = "isn't intact" if is_damaged else f"isn't on disk{advice}"
        return cls(best, f"the best evaluation is {at}, whose checkpoint {lacks}; {on_disk}")

    def require(self, directory: RunDirectory) -> CheckpointInfo:
        """Return the best checkpoint of the run.

        Raises:
            CheckpointError: none has a score.
        """
        if self.info is None:
            why = self.warning or f"no checkpoint has a score; {KEEP_BEST}=1 keeps the best of a run that evaluates"
            raise CheckpointError(f"{directory.path}: {why}")
        return self.info


def _is_best(info: CheckpointInfo, top: Score, step: int | None) -> bool:
    score = info.score
    if score is None or (score.name, score.mode) != (top.name, top.mode):
        return False
    # a better one was saved by an attempt whose steps were repeated
    return info.step == step or score.loss < top.loss


def _described(info: CheckpointInfo) -> str:
    assert info.score is not None
    return f"that of step {info.step}, with {info.score.name} {info.score.value:.6g}"

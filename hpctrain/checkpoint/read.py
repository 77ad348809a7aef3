"""Read a checkpoint back: choose the newest intact one, verify it, map its files, restore."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile

import torch

from hpctrain.checkpoint.retention import quarantine, remove_leftovers
from hpctrain.checkpoint.state import Snapshot
from hpctrain.checkpoint.stored_tensor import read_parts
from hpctrain.errors import CheckpointDamagedError, CheckpointError, CheckpointUnlikeError
from hpctrain.rank.world import World
from hpctrain.run.checkpoint_manifest import INDEX, STATE
from hpctrain.run.checkpoints import CheckpointInfo, Problem, ShowRead, Verify, find_damage, newest_intact, wrong_files
from hpctrain.run.directory import RunDirectory
from hpctrain.run.gone_checkpoints import describe_gone, gone_step, may_start_over, move_records_aside
from hpctrain.run.ledger import Claim

log = logging.getLogger("hpctrain.checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint(Snapshot):
    """A snapshot whose tensors are mapped from the files of its checkpoint; drop it once it is restored.

    Attributes:
        path: the directory of the checkpoint.
        passed_over: newer ones that aren't intact; empty on the ranks that didn't choose.
    """

    path: Path
    passed_over: tuple[CheckpointInfo, ...] = ()

    @property
    def world_size(self) -> int:
        """World size of the attempt that wrote it."""
        return int(self.state["world_size"])

    @property
    def extra(self) -> Mapping[str, Any]:
        """The values that the trainer added."""
        extra: Mapping[str, Any] = self.state["extra"]
        return extra

    @property
    def average(self) -> Mapping[str, Any]:
        """The moving averages of the weights by name, each a tensor or a `StoredTensor`; empty without any."""
        return self.extra.get("ema") or {}

    @property
    def states(self) -> dict[str, Any]:
        """All states by key (`Stateful`): of `state` and its ``extra``; also ``model``, ``optimizers`` and ``path``."""
        return {**self.state, **self.extra, "model": self.model, "optimizers": self.optimizer, "path": self.path}


def load_newest(directory: RunDirectory, world: World, show: ShowRead | None = None) -> LoadedCheckpoint | None:
    """Load the newest intact checkpoint of a run, the same one on every rank; collective.

    Rank zero chooses it. The first rank of each node verifies what that node reads; of a checkpoint of which each rank
    wrote a part, each rank verifies a part.

    Args:
        directory: of the run.
        world: the ranks.
        show: called on rank zero while it reads.

    Returns:
        None if the run has no checkpoint yet.

    Raises:
        CheckpointDamagedError: the run has checkpoints, but none is intact; on every rank.
        CheckpointUnlikeError: this rank's node reads other bytes than rank zero.
        CheckpointError: this rank can't read the chosen checkpoint.
    """
    chosen: Path | None = None
    passed_over: tuple[CheckpointInfo, ...] = ()
    error: CheckpointError | None = None
    # One rank chooses: on a file system with client caches, ranks may see different folders, and would resume from
    # different steps.
    verification = SharedVerification(world)
    if world.is_rank_zero:
        try:
            chosen, passed_over = choose_newest(directory, show, verification)
        except CheckpointError as caught:
            # every rank must learn of the error before any of them raises
            error = caught
        verification.end()
    else:
        verification.join()
    none_intact = isinstance(error, CheckpointDamagedError)
    name, problem, none_intact = world.broadcast((chosen and str(chosen), error and str(error), none_intact))
    if problem is not None:
        raise error or (CheckpointDamagedError(problem) if none_intact else CheckpointError(problem))
    if name is None:
        return None
    path = Path(name)
    # all ranks have verified it together
    if is_sharded_checkpoint(path):
        return replace(load(path, verified=True), passed_over=passed_over)
    try:
        # the rank that verifies brings the files into the node's page cache, from which the other ranks map them
        checkpoint = load(path, verified=world.is_rank_zero or world.local_rank > 0)
    except CheckpointDamagedError as damaged:
        raise CheckpointUnlikeError(
            f"{damaged}. But rank zero read it intact: check this node's memory, and its mount of the file system"
        ) from damaged
    return replace(checkpoint, passed_over=passed_over)


def prepare_resume(directory: RunDirectory, claim: Claim, world: World) -> bool:
    """Return whether the run has checkpoints to resume from, the same on every rank; collective.

    Rank zero first removes what earlier attempts left behind. If no checkpoint is intact and the user allows starting
    over, it then moves the run's records out of the way.

    Args:
        directory: of the run.
        claim: of this attempt.
        world: the ranks.

    Raises:
        CheckpointError: all checkpoints that the run saved are gone; on every rank.
        SupersededError: a later attempt owns the run; on rank zero alone.
    """
    has_checkpoints, problem = False, ""
    # with client caches, other ranks may see another folder
    if world.is_rank_zero:
        claim.require_ownership()
        if names := remove_leftovers(directory):
            log.info("cleaned up after an earlier attempt: %s", ", ".join(names))
        if may_start_over(directory):
            _start_over(directory, claim)
        has_checkpoints = bool(directory.checkpoint_steps())
        problem = "" if has_checkpoints else describe_gone(directory)
    has_checkpoints, problem = world.broadcast((has_checkpoints, problem))
    if problem:
        raise CheckpointError(problem, elsewhere=not world.is_rank_zero)
    return bool(has_checkpoints)


def _start_over(directory: RunDirectory, claim: Claim) -> None:
    newest, passed_over = newest_intact(directory)
    if newest is not None:
        log.info("resume.from_scratch=true has no effect: %s is intact", newest.path)
        return
    quarantine(passed_over, claim)
    # a checkpoint that can't be read at the moment may be intact
    if not directory.checkpoint_steps():
        claim.require_ownership()
        folder = move_records_aside(directory, claim.attempt)
        log.warning(
            "resume.from_scratch=true, and no checkpoint is left: starting from step 0; the metrics so far are in %s",
            folder,
        )


def choose_newest(
    directory: RunDirectory, show: ShowRead | None = None, verify: Verify | None = None
) -> tuple[Path | None, tuple[CheckpointInfo, ...]]:
    """Choose the newest intact checkpoint; log a warning that names newer, damaged ones. Not collective.

    Args:
        directory: of the run.
        show: called while a checkpoint is read.
        verify: compares the files of checkpoints of which each rank wrote a part; None if this process does.

    Returns:
        Its path, None if the run has no checkpoint yet; and the newer ones that aren't intact.

    Raises:
        CheckpointDamagedError: the run has checkpoints, but none is intact.
    """
    gone = gone_step(directory)
    newest, damaged = newest_intact(directory, show, verify)
    problems = "; ".join(f"{info.path} ({info.problem})" for info in damaged)
    if newest is None:
        if not damaged:
            return None, ()
        raise CheckpointDamagedError(
            f"no checkpoint of the run is intact: {problems}. Restore one from a copy, or train from step 0 again: "
            f"`python -m hpctrain resume {directory.as_typed} resume.from_scratch=true`"
        )
    if damaged:
        log.warning("taking %s, since what is newer is not intact: %s", newest.path, problems)
    if gone is not None:
        log.warning("the checkpoint of step %d, which the run saved, is gone: using %s", gone, newest.path)
    return newest.path, tuple(damaged)


def load(path: Path, *, verified: bool = False) -> LoadedCheckpoint:
    """Load the checkpoint in the directory ``path``; not collective.

    No file is mapped before its checksum is compared.

    Args:
        path: its directory.
        verified: whether this rank, or another one of this node, has compared the checksums already.

    Raises:
        CheckpointDamagedError: it isn't intact.
        CheckpointError: its files match their checksums, but can't be read.
    """
    # read the files, not a mapping of them: an unreadable block then raises an error instead of SIGBUS
    if not verified and (problem := find_damage(path)):
        raise CheckpointDamagedError(f"{path} is not intact: {problem}; the run's other checkpoints are next to it")
    if is_sharded_checkpoint(path):
        return LoadedCheckpoint(path=path, **read_parts(path, _map_file(path / STATE)))
    parts = {name: _map_file(path / f"{name}.pt") for name in ("model", "optimizer", "state")}
    return LoadedCheckpoint(path=path, **parts)


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether each rank of a mesh wrote a part of the checkpoint in the directory ``path``."""
    return (path / INDEX).exists()


def _map_file(file: Path) -> Any:
    # weights_only: a checkpoint must not be able to execute code; mmap: the ranks of a node share the pages
    try:
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, BadZipFile, UnpicklingError) as error:
        raise CheckpointError(f"{file} can't be loaded: {describe_unreadable(error)}") from error


def describe_unreadable(error: Exception) -> str:
    """Describe why torch can't read a file, without its advice to use ``weights_only=False``."""
    if not isinstance(error, UnpicklingError):
        return str(error)
    match = re.search(r"(?:GLOBAL|class|function):? `?([\w.]+)", str(error))
    what = f" ({match[1]})" if match else ""
    return (
        f"it contains more than tensors and plain values{what}, or is damaged; other objects could execute code, and "
        "are never loaded: save the state_dict alone"
    )


_WRITER = re.compile(r"__(?P<rank>\d+)_\d+\.distcp")


class SharedVerification:
    """Verifies checkpoints by all ranks, while rank zero chooses one.

    Rank zero calls it for each checkpoint that it considers, and then `end`. The other ranks call `join` meanwhile.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, path: Path, files: Mapping[str, Any], show: ShowRead | None) -> list[Problem]:
        """Verify a checkpoint, on rank zero.

        Args:
            path: its directory.
            files: the entries of its manifest, by name.
            show: called while this rank reads its share.
        """
        self._world.broadcast([str(path), dict(files)])
        gathered = self._world.gather(self._verify_share(path, files, show))
        assert gathered is not None
        return [Problem(text, unreadable) for problems in gathered for text, unreadable in problems]

    def end(self) -> None:
        """Let the other ranks go; rank zero calls it once it has chosen."""
        self._world.broadcast(None)

    def join(self) -> None:
        """Verify what rank zero asks for until it has chosen, on every other rank."""
        while (request := self._world.broadcast(None)) is not None:
            path, files = request
            self._world.gather(self._verify_share(Path(path), files, None))

    def _verify_share(self, path: Path, files: Mapping[str, Any], show: ShowRead | None) -> list[tuple[str, bool]]:
        share = {name: entry for name, entry in files.items() if self._reader(name) == self._world.rank}
        try:
            problems = wrong_files(path, share, show=show)
        except OSError as error:
            # every rank must take part in the exchange that follows
            problems = [Problem(f"rank {self._world.rank} can't read it: {error.strerror}", unreadable=True)]
        return [(problem.text, problem.unreadable) for problem in problems]

    def _reader(self, name: str) -> int:
        """The rank that verifies a file: the one that wrote it, in a world as large as that of the save."""
        writer = _WRITER.fullmatch(name)
        return 0 if writer is None else int(writer["rank"]) % self._world.size

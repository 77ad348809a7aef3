"""One checkpoint for all ranks, chosen by one of them."""

from __future__ import annotations

from pathlib import Path

from hpctrain.checkpoint.intake import Intake
from hpctrain.checkpoint.reader import LoadedCheckpoint, choose_newest, load
from hpctrain.distributed.world import World
from hpctrain.errors import CheckpointDamagedError, CheckpointError, CheckpointUnlikeError
from hpctrain.run.directory import RunDirectory


def load_together(directory: RunDirectory, world: World) -> LoadedCheckpoint | None:
    """The newest intact checkpoint of a run, the same on every rank; collective.

    Rank zero chooses it, so that ranks which see the folder differently, on a file system with caches of its own, can't
    go on from different steps. The first rank of each node compares what that node reads, which brings it into the page
    cache; the others map the files from there, and read what an optimizer on the CPU keeps.

    Returns:
        None where the run has no checkpoint yet.

    Raises:
        CheckpointDamagedError: there are some, and none is intact; on every rank.
        CheckpointUnlikeError: this rank's node reads other bytes than rank zero.
        CheckpointError: this rank can't read the one that was chosen.
    """
    intake = Intake() if world.device.type == "cpu" else None
    path: Path | None = None
    error: CheckpointError | None = None
    if world.is_rank_zero:
        try:
            path = choose_newest(directory, intake)
        except CheckpointError as caught:
            # every rank must learn of it before any of them raises
            error = caught
    path, error = world.broadcast((path, error))
    if error is not None:
        raise error
    if path is None:
        return None
    try:
        return load(path, verified=world.is_rank_zero or world.local_rank > 0, intake=intake)
    except CheckpointDamagedError as damaged:
        raise CheckpointUnlikeError(
            f"{damaged}. But rank zero read it intact: see to this node's memory, and to its mount of the file system"
        ) from damaged

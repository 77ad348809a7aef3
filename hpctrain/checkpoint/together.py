"""One checkpoint for all ranks, chosen by one of them."""

from __future__ import annotations

from pathlib import Path

from hpctrain.checkpoint.intake import Intake
from hpctrain.checkpoint.reader import LoadedCheckpoint, choose_newest, load
from hpctrain.distributed.world import World
from hpctrain.errors import CheckpointError
from hpctrain.run.directory import RunDirectory


def load_together(directory: RunDirectory, world: World) -> LoadedCheckpoint | None:
    """The newest intact checkpoint of a run, the same on every rank; collective.

    Rank zero reads and verifies it for all, which brings it into its node's page cache; every rank then maps the files,
    and reads what an optimizer on the CPU keeps. So ranks that see the folder differently, on a file system with caches
    of its own, can't go on from different steps.

    Returns:
        None where the run has no checkpoint yet.

    Raises:
        CheckpointDamagedError: there are some, and none is intact; on every rank.
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
    return None if path is None else load(path, verified=True, intake=intake)

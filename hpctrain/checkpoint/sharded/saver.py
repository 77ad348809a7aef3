"""Save by all ranks of a mesh: each copies what it writes, and writes it in the background while training continues."""

from __future__ import annotations

import logging
from typing import Any

from hpctrain.checkpoint.saver import CheckpointSaver
from hpctrain.checkpoint.sharded.live_shards import KnownParts, LiveShards
from hpctrain.checkpoint.sharded.write import ShardedWriter
from hpctrain.config.checkpoint import Checkpoint
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.rank.stop_request import StopRequest
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Claim

log = logging.getLogger("hpctrain.checkpoint")


class ShardedSaver(CheckpointSaver):
    """Saves on every rank; `save` is collective, and must not be called where rank zero can't save.

    The errors of all ranks are raised on rank zero, as those of a whole checkpoint are. On the other ranks nothing is
    raised, so that all ranks reach the next exchange.

    Args:
        directory: of the run.
        claim: of this attempt.
        policy: conf/checkpoint.
        stop: see `CheckpointSaver`.
        world: the ranks, with a mesh.
        copies: names of parameters of this rank that another one writes.
        options: further ones of a `CheckpointSaver`.
    """

    def __init__(
        self,
        directory: RunDirectory,
        claim: Claim,
        policy: Checkpoint,
        stop: StopRequest,
        *,
        world: TrainingWorld,
        copies: frozenset[str] = frozenset(),
        **options: Any,
    ) -> None:
        super().__init__(directory, claim, policy, stop, leads=world.is_rank_zero, **options)
        self._writer = ShardedWriter(directory, claim, world, num_files=policy.writers)
        self._world = world
        self._copies = copies
        self._known_parts: KnownParts = {}

    def live_state(self, **fields: Any) -> LiveShards:
        """See `CheckpointSaver`."""
        return LiveShards(**fields, world=self._world, copies=self._copies, known=self._known_parts)

    def begin(self) -> tuple[bool, Exception | None]:
        """See `CheckpointSaver`: all ranks save, unless rank zero has an error of the save before."""
        failure: Exception | None = None
        if self._leads:
            try:
                self.finish()
            except Exception as error:
                failure = error
        return bool(self._world.broadcast(failure is None)), failure

    @property
    def _takes_part(self) -> bool:
        return True

    def _snapshot(self, state: Any) -> Any:
        try:
            return super()._snapshot(state)
        except Exception as error:
            # every rank must take part in the exchange, in which rank zero learns of the error
            return error

    def _write(self, snapshot: Any, retain: bool) -> None:
        if self._leads:
            super()._write(snapshot, retain)
            return
        try:
            self._writer.write(snapshot)
        except Exception as error:
            log.debug("rank zero reports why the save failed: %s", error)
        finally:
            self._longest_s = max(self._longest_s, self._clock() - self._began_at)

"""Meters over the samples of all ranks, and their state in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hpctrain.checkpoint.state import Stateful
from hpctrain.metrics.meter import Meter, SilentMeter
from hpctrain.parallel.mesh import TrainingWorld


def meter_of(world: TrainingWorld, *names: str) -> Meter:
    """Make a meter over all ranks; of those that compute layers together, on the same samples, one counts.

    Args:
        world: the ranks.
        names: metrics that are in every result.
    """
    reduce = world.sum_ if world.size > 1 else None
    kind = Meter if world.share.is_counted else SilentMeter
    return kind(world.device, reduce, names=names, union=world.union)


class MeterState(Stateful):
    """The sums in a meter since the last record: over all ranks, and on each one.

    Args:
        meter: of this rank.
        world: the ranks.
    """

    is_collective: ClassVar[bool] = True

    def __init__(self, meter: Meter, world: TrainingWorld) -> None:
        self._meter = meter
        self._world = world

    def state(self) -> dict[str, Any]:
        """Return the sums over all ranks, and at rank zero those of each rank; collective."""
        return {"meter_by_rank": self._world.gather(self._meter.own_state()), "meter": self._meter.state()}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Continue each rank's sums; on another number of ranks, rank zero has those of all."""
        by_rank = saved.get("meter_by_rank", ())
        own_sums = by_rank[self._world.rank] if len(by_rank) == self._world.size else None
        self._meter.load_state(saved.get("meter", {}), rank=self._world.rank, own=own_sums)

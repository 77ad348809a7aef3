"""Meters over the samples of all ranks."""

from __future__ import annotations

from hpctrain.distributed.world import World
from hpctrain.metrics.meter import Meter, SilentMeter


def meter_of(world: World, *names: str) -> Meter:
    """Make a meter over all ranks; of those that compute layers together, on the same samples, one counts.

    Args:
        world: the ranks.
        names: metrics that are in every result.
    """
    reduce = world.sum_ if world.size > 1 else None
    kind = Meter if world.counts_samples else SilentMeter
    return kind(world.device, reduce, names=names, union=world.union)

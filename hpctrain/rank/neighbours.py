"""The neighbours of a rank in its pipeline, and the ranks with which it shares parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hpctrain.config.mesh import MeshShape
from hpctrain.rank.wire import Wire


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The wires of a rank in a pipeline; the last position is the neighbour of the first one, for interleaved stages.

    Attributes:
        position: of this rank, from 0 for the model's first layers.
        degree: number of positions.
        from_before: activations of the position before.
        to_next: activations for the next position.
        from_next: gradients of the next position.
        to_before: gradients for the position before.
    """

    position: int
    degree: int
    from_before: Wire
    to_next: Wire
    from_next: Wire
    to_before: Wire

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        self.to_next.finish()
        self.to_before.finish()


def ranks_at(shape: MeshShape, position: int) -> range:
    """Return the ranks at a position: the first ranks are at the last one, since rank zero logs the loss."""
    begin = (shape.pipeline - 1 - position) * shape.ranks_per_stage
    return range(begin, begin + shape.ranks_per_stage)


def join_neighbours(
    shape: MeshShape, rank: int, control: dist.ProcessGroup, device: torch.device, timeout: timedelta
) -> Neighbours:
    """Make the groups of all neighbours; collective over all ranks.

    Args:
        shape: of the mesh, with more than one position.
        rank: of this process.
        control: group of all ranks, on the CPU.
        device: of this rank.
        timeout: bound on each transfer.
    """
    wires: dict[tuple[int, bool], Wire] = {}
    for first in range(shape.pipeline):
        following = (first + 1) % shape.pipeline
        for is_forward in (True, False):
            for pair in zip(ranks_at(shape, first), ranks_at(shape, following), strict=True):
                group = dist.new_group(list(pair), timeout=timeout, group_desc="pipeline")
                if rank in pair:
                    peer = pair[0] if rank == pair[1] else pair[1]
                    wires[peer_key(pair, rank), is_forward] = Wire(group, control, peer, device)
    return Neighbours(
        shape.position(rank), shape.pipeline, wires[-1, True], wires[1, True], wires[1, False], wires[-1, False]
    )


def peer_key(pair: tuple[int, int], rank: int) -> int:
    """Return 1 where a rank is the first one of two neighbours, and -1 where it is the second one."""
    return 1 if rank == pair[0] else -1


def groups_of_positions(
    shape: MeshShape, rank: int, together: Sequence[tuple[int, ...]], timeout: timedelta
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make groups of the ranks of a pipeline that have parameters together; collective over all ranks.

    Args:
        shape: of the mesh.
        rank: of this process.
        together: positions, the same list on every rank.
        timeout: bound on each collective.

    Returns:
        The groups of this rank, by their positions.
    """
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for positions in sorted(set(together)):
        for ranks in zip(*(ranks_at(shape, position) for position in positions), strict=True):
            group = dist.new_group(list(ranks), timeout=timeout, group_desc="shared parameters")
            if rank in ranks:
                found[positions] = group
    return found

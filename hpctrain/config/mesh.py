"""The mesh of ranks: how many replicas of the model there are, and how many ranks hold one together."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.config.parallel import Parallel
from hpctrain.errors import ConfigError
from hpctrain.phrases import counted


@dataclass(frozen=True, slots=True)
class MeshShape:
    """The degrees of a mesh; their product is the number of ranks.

    Ranks with consecutive numbers share a replica, so that it stays inside a node if it fits there.

    Attributes:
        replicate: number of replicas.
        shard: number of ranks that hold a replica together.
    """

    replicate: int
    shard: int

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks with samples of their own."""
        return self.replicate * self.shard

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the mesh."""
        return math.prod(self.degrees.values())

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees by name, outermost first."""
        return {"replicate": self.replicate, "shard": self.shard}

    def picture(self, hosts: list[str]) -> list[str]:
        """Draw the mesh, a line for each replica: its ranks, by node.

        Args:
            hosts: of all ranks, in rank order.
        """
        lines = []
        for replica in range(self.replicate):
            on_nodes: dict[str, list[int]] = {}
            for rank in range(replica * self.shard, (replica + 1) * self.shard):
                on_nodes.setdefault(hosts[rank], []).append(rank)
            # consecutive on each node
            spans = [
                f"{ranks[0]}-{ranks[-1]} on {host}" if len(ranks) > 1 else f"{ranks[0]} on {host}"
                for host, ranks in on_nodes.items()
            ]
            lines.append(f"replica {replica}: rank{'s' * (self.shard > 1)} {', '.join(spans)}")
        return lines


def mesh_shape(parallel: Parallel, world_size: int, local_world_size: int) -> MeshShape | None:
    """Return the mesh of a run's ranks; None unless parallel=mesh.

    Args:
        parallel: of the configuration.
        world_size: number of ranks.
        local_world_size: ranks of a node.

    Raises:
        ConfigError: the degrees don't fit the number of ranks.
    """
    if parallel.kind != "mesh":
        return None
    replicate = parallel.replicate_degree
    shard = local_world_size if parallel.shard_degree is None else parallel.shard_degree
    if replicate == -1:
        replicate = _what_is_left("parallel.shard_degree", shard, world_size)
    elif shard == -1:
        shard = _what_is_left("parallel.replicate_degree", replicate, world_size)
    if replicate * shard != world_size:
        problem = (
            f"with parallel.replicate_degree={replicate} needs {replicate * shard} ranks, but there are {world_size}"
        )
        remedy = "set one of the two to -1: what the other leaves"
        raise ConfigError("parallel.shard_degree", shard, problem, remedy)
    return MeshShape(replicate, shard)


def _what_is_left(key: str, given: int, world_size: int) -> int:
    if world_size % given:
        fitting = [str(degree) for degree in range(1, world_size + 1) if world_size % degree == 0]
        problem = f"doesn't divide {counted(world_size, 'rank')}"
        raise ConfigError(key, given, problem, f"use one of {', '.join(fitting)}")
    return world_size // given

"""The mesh of ranks: how many replicas of the model there are, and how the ranks that hold one divide it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.config.parallel import Parallel
from hpctrain.errors import ConfigError
from hpctrain.phrases import all_of, counted


@dataclass(frozen=True, slots=True)
class MeshShape:
    """The degrees of a mesh; their product is the number of ranks.

    Ranks with consecutive numbers have the same layers. Among them, ranks with consecutive numbers share a replica, so
    that it stays inside a node if it fits there. The same holds for the ranks that compute each layer together.

    Attributes:
        replicate: number of replicas.
        shard: number of shards of a replica, or of each stage of it.
        tensor: number of ranks that compute each layer together, on the same samples.
        pipeline: number of groups of ranks among which the layers are divided.
    """

    replicate: int
    shard: int
    tensor: int = 1
    pipeline: int = 1

    @property
    def data_parallel_size(self) -> int:
        """Number of groups of `tensor` x `pipeline` ranks; each of them has samples of its own."""
        return self.replicate * self.shard

    @property
    def replica_size(self) -> int:
        """Number of ranks that hold a replica together."""
        return self.shard * self.tensor * self.pipeline

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks that have the same layers."""
        return self.replicate * self.shard * self.tensor

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the mesh."""
        return math.prod(self.degrees.values())

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees by name, outermost first; `pipeline` and `tensor` only if they are more than 1."""
        degrees = {
            "pipeline": self.pipeline,
            "replicate": self.replicate,
            "shard": self.shard,
            "tensor": self.tensor,
        }
        return {name: degree for name, degree in degrees.items() if degree > 1 or name in ("replicate", "shard")}

    def position(self, rank: int) -> int:
        """The place of a rank in the pipeline, from 0 for the ranks with the model's first layers.

        The first ranks are the last in the pipeline: rank zero writes the log, and the last stage computes the loss.
        """
        return self.pipeline - 1 - rank // self.ranks_per_stage

    def picture(self, hosts: list[str], stages_per_rank: int = 1) -> list[str]:
        """Draw the mesh, a line for each replica and each place in the pipeline: its ranks, by node.

        Args:
            hosts: of all ranks, in rank order.
            stages_per_rank: of a pipeline.
        """
        lines, size = [], self.shard * self.tensor
        for replica, position in itertools.product(range(self.replicate), range(self.pipeline)):
            first = (self.pipeline - 1 - position) * self.ranks_per_stage + replica * size
            on_nodes: dict[str, list[int]] = {}
            for rank in range(first, first + size):
                on_nodes.setdefault(hosts[rank], []).append(rank)
            # consecutive on each node
            spans = [
                f"{ranks[0]}-{ranks[-1]} on {host}" if len(ranks) > 1 else f"{ranks[0]} on {host}"
                for host, ranks in on_nodes.items()
            ]
            stages = [str(position + turn * self.pipeline) for turn in range(stages_per_rank)]
            part = f", stage{'s' * (len(stages) > 1)} {all_of(stages)}" if self.pipeline > 1 else ""
            lines.append(f"replica {replica}{part}: rank{'s' * (size > 1)} {', '.join(spans)}")
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
    tensor = local_world_size if parallel.tensor_degree is None else parallel.tensor_degree
    shard = parallel.shard_degree
    if shard is None:
        shard = local_world_size // tensor if tensor > 0 and local_world_size % tensor == 0 else local_world_size
    wanted = {
        "shard": shard,
        "replicate": parallel.replicate_degree,
        "tensor": tensor,
        "pipeline": parallel.pipeline_degree,
    }
    shape = MeshShape(**_without_open(wanted, world_size))
    if local_world_size % shape.tensor:
        problem = f"doesn't divide the {counted(local_world_size, 'rank')} of a node, which send each other every layer"
        raise ConfigError("parallel.tensor_degree", shape.tensor, problem, f"use one of {_divisors(local_world_size)}")
    return shape


def data_parallel_size(parallel: Parallel, world_size: int, local_world_size: int) -> int:
    """Return how many shares a run's samples have: one for each rank, or for each group of ranks that has the same.

    Args:
        parallel: of the configuration.
        world_size: number of ranks.
        local_world_size: ranks of a node.

    Raises:
        ConfigError: the degrees don't fit the number of ranks.
    """
    shape = mesh_shape(parallel, world_size, local_world_size)
    return world_size if shape is None else shape.data_parallel_size


def _without_open(degrees: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Return the degrees with that of -1 replaced by what the others leave."""
    given = {name: degree for name, degree in degrees.items() if degree != -1}
    needed = math.prod(given.values())
    is_open = len(given) < len(degrees)
    if needed == world_size or (is_open and world_size % needed == 0):
        return {name: world_size // needed if degree == -1 else degree for name, degree in degrees.items()}
    if is_open:
        for name, degree in given.items():
            if world_size % degree:
                problem = f"doesn't divide {counted(world_size, 'rank')}"
                raise ConfigError(f"parallel.{name}_degree", degree, problem, f"use one of {_divisors(world_size)}")
    key, *others = [name for name, degree in given.items() if degree != 1 or name in ("shard", "replicate")]
    with_others = all_of([f"parallel.{name}_degree={given[name]}" for name in others])
    problem = f"with {with_others} needs {needed} ranks{' or a multiple' * is_open}, but there are {world_size}"
    remedy = "change one of them" if is_open else "set one of them to -1: what the others leave"
    if len(others) == 1 and not is_open:
        remedy = "set one of the two to -1: what the other leaves"
    raise ConfigError(f"parallel.{key}_degree", given[key], problem, remedy)


def _divisors(number: int) -> str:
    return ", ".join(str(degree) for degree in range(1, number + 1) if number % degree == 0)


def keeps_gradients_whole(parallel: Parallel, shape: MeshShape) -> bool:
    """Whether gradients stay whole until the last micro-batch of a step, and are reduced to those of shards only there.

    This is also so where a rank's shard is the whole weight: it saves no memory to reduce them in each micro-batch, and
    takes two copies. With `cpu_offload`, gradients leave the GPU in each micro-batch.

    Args:
        parallel: of the configuration.
        shape: of the mesh.
    """
    return parallel.keep_gradients_whole or (shape.shard == 1 and not parallel.cpu_offload)

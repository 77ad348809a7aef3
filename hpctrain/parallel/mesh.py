"""The ranks of a training: the mesh in which they share the model, and each one's share of the samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpctrain.config.mesh import MeshShape
from hpctrain.rank.group import SAVING, gloo_group
from hpctrain.rank.world import World

if TYPE_CHECKING:
    # only pipelines have them
    from hpctrain.parallel.neighbours import Neighbours

_meshes: list[Mesh] = []
"""The mesh that this process has joined last; empty if each rank has a replica of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataShare:
    """The samples that a rank computes; several ranks may compute the same ones.

    Attributes:
        number: of this rank's share, from 0; ranks that compute the same samples have the same one.
        count: number of shares: that of ranks, unless several of them compute the same samples.
        is_counted: whether this rank counts in sums over samples: of the ranks with the same ones, the first with the
            loss.
        random_stream: which random numbers this rank draws: those of the ranks that compute each layer together. Their
            dropout has the same mask, so that what they compute in full stays equal.
        num_together: number of ranks that compute each layer together, on the same samples.
        num_positions: number of groups of ranks that compute different layers, one after the other.
        leads: whether this rank is the first of those that train the same parameters.
    """

    number: int
    count: int
    is_counted: bool
    random_stream: int
    num_together: int
    num_positions: int
    leads: bool

    @classmethod
    def of(cls, rank: int, size: int, shape: MeshShape | None) -> DataShare:
        """Derive the share of a rank.

        Args:
            rank: its number.
            size: number of ranks.
            shape: of the mesh; None if each rank has a replica of the model.
        """
        together, positions = (1, 1) if shape is None else (shape.tensor, shape.pipeline)
        group, place = divmod(rank, size // positions)
        number, count = place // together, size // positions // together
        return cls(
            number=number,
            count=count,
            is_counted=group == 0 and rank % together == 0,
            random_stream=number + group * count,
            num_together=together,
            num_positions=positions,
            leads=place == 0,
        )

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees on which the states of single ranks depend, as checkpoints have them; without those of 1."""
        degrees = {"tensor_degree": self.num_together, "pipeline_degree": self.num_positions}
        return {name: degree for name, degree in degrees.items() if degree != 1}

    def has_saved_layers(self, saved: Mapping[str, Any]) -> bool:
        """Whether a rank of a checkpoint's world had the same layers as the rank of this number has."""
        return int(saved.get("pipeline_degree", 1)) == self.num_positions

    def has_saved_degrees(self, saved: Mapping[str, Any]) -> bool:
        """Whether a checkpoint was saved with the same `degrees`."""
        return self.has_saved_layers(saved) and int(saved.get("tensor_degree", 1)) == self.num_together

    def idle_warning(self, num_micro_batches: int, micro_batch_size: int) -> str:
        """Return a warning of ranks that always wait; empty if a step has enough micro-batches.

        Args:
            num_micro_batches: of a step.
            micro_batch_size: samples in each.
        """
        if num_micro_batches >= self.num_positions:
            return ""
        return (
            f"a step has fewer micro-batches ({num_micro_batches}) than its pipeline has groups of ranks "
            f"({self.num_positions}), so that some always wait: set a larger trainer.global_batch_size, or a smaller "
            f"trainer.micro_batch_size than {micro_batch_size}"
        )


@dataclass(frozen=True, kw_only=True)
class TrainingWorld(World):
    """The ranks of a training.

    Attributes:
        mesh: how the ranks share the model; None if each has a replica, and in a world of one.
    """

    mesh: Mesh | None = None

    @cached_property
    def share(self) -> DataShare:
        """This rank's share of the samples."""
        return DataShare.of(self.rank, self.size, None if self.mesh is None else self.mesh.shape)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Mesh in which the ranks of an attempt share the model.

    Attributes:
        shape: its degrees.
        device_mesh: torch's, with the dimension `shard`, after `replicate` if there are several replicas, and before
            `tensor` if several ranks compute each layer together; with a pipeline, `pipeline` comes first.
        saving: a gloo group of all ranks for the threads that write checkpoints: they exchange messages while the
            training thread uses the other groups.
        samples: ranks with other samples than this one, and itself: one of each group that computes layers together,
            at the same position of their pipelines. None if these are all ranks.
        same_stages: ranks at the same position of their pipelines, which hold the same stages; None if these are all
            ranks.
        neighbours: of this rank in its pipeline; None without one.
    """

    shape: MeshShape
    device_mesh: DeviceMesh
    saving: dist.ProcessGroup
    samples: dist.ProcessGroup | None = None
    same_stages: dist.ProcessGroup | None = None
    neighbours: Neighbours | None = None

    @property
    def data_mesh(self) -> DeviceMesh:
        """The dimensions over which FSDP2 shards and replicates."""
        if self.shape.tensor == self.shape.pipeline == 1:
            return self.device_mesh
        return self.device_mesh[_dimensions_of_data(self.shape)]

    @property
    def tensor_mesh(self) -> DeviceMesh:
        """The ranks that compute each layer together with this one."""
        return self.device_mesh["tensor"]


def join_mesh(world: World, shape: MeshShape | None, timeout_s: float) -> TrainingWorld:
    """Make the groups of a mesh, after the group of all ranks; collective.

    Args:
        world: the ranks.
        shape: whose product is the number of ranks; None if each rank has a replica of the model.
        timeout_s: bound in seconds on each collective.
    """
    # a world of one has no store, and forms no mesh
    mesh = None if shape is None or world.store is None else _form_mesh(world, shape, timedelta(seconds=timeout_s))
    _meshes[:] = [] if mesh is None else [mesh]
    return TrainingWorld(**{field.name: getattr(world, field.name) for field in fields(World)}, mesh=mesh)


def fake_world(shape: MeshShape, devices: tuple[torch.device, ...]) -> TrainingWorld:
    """Pretend to be rank zero of a mesh whose other ranks don't exist, to find out how much memory it would need.

    Collectives return at once, as if all ranks had sent what this one sends: sizes are right, and values are wrong. The
    default group of the process is of this kind from then on. The size of the world is the number of ranks with the
    same samples.

    Args:
        shape: of the mesh.
        devices: of this process.
    """
    # torch's own way to run one rank of many; it is part of its test tools
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=shape.num_ranks)
    assert dist.group.WORLD is not None
    device_mesh = _device_mesh(shape, devices[0])
    mesh = Mesh(shape, device_mesh, dist.group.WORLD, _group_with_other_samples(shape, device_mesh))
    _meshes[:] = [mesh]
    return TrainingWorld(rank=0, size=shape.tensor, local_rank=0, devices=devices, mesh=mesh)


def group_with_other_samples() -> dist.ProcessGroup | None:
    """Return the group of the ranks with other samples than this one, and itself; None if these are all ranks."""
    return _meshes[0].samples if _meshes else None


def _form_mesh(world: World, shape: MeshShape, timeout: timedelta) -> Mesh:
    assert world.store is not None
    assert world.control is not None
    device_mesh = _device_mesh(shape, world.device)
    same_stages = neighbours = None
    samples = _group_with_other_samples(shape, device_mesh)
    if shape.pipeline > 1:
        from hpctrain.parallel.neighbours import join_neighbours

        same_stages = _group_over(device_mesh, [name for name in shape.degrees if name != "pipeline"], "same_stages")
        neighbours = join_neighbours(shape, world.rank, world.control, world.device, timeout)
    for group in (*device_mesh.get_all_groups(), samples, same_stages):
        # torch gives a mesh's groups its own default of half an hour
        if group is not None:
            _set_timeout(timeout, group)
    saving = gloo_group(world.store, timeout, SAVING)
    return Mesh(shape, device_mesh, saving, samples, same_stages, neighbours)


def _set_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    public = getattr(dist, "set_timeout", None)  # since torch 2.14, which warns of the other
    (public or dist.distributed_c10d._set_pg_timeout)(timeout, group)


def _device_mesh(shape: MeshShape, device: torch.device) -> DeviceMesh:
    degrees = {name: degree for name, degree in shape.degrees.items() if degree > 1 or name == "shard"}
    return init_device_mesh(device.type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))


def _dimensions_of_data(shape: MeshShape) -> tuple[str, ...]:
    return ("replicate", "shard") if shape.replicate > 1 else ("shard",)


def _group_with_other_samples(shape: MeshShape, device_mesh: DeviceMesh) -> dist.ProcessGroup | None:
    if shape.tensor == shape.pipeline == 1:
        return None
    return _group_over(device_mesh, _dimensions_of_data(shape), "samples")


def _group_over(device_mesh: DeviceMesh, names: Sequence[str], flattened: str) -> dist.ProcessGroup:
    """Return the group of this rank over some dimensions of the mesh."""
    dimensions = [name for name in device_mesh.mesh_dim_names or () if name in names]
    if len(dimensions) == 1:
        return device_mesh.get_group(dimensions[0])
    return device_mesh[tuple(dimensions)]._flatten(flattened).get_group()

"""The mesh of an attempt: groups of ranks that hold a replica of the model together, and groups of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpctrain.config.mesh import MeshShape
from hpctrain.rank.group import SAVING, gloo_group
from hpctrain.rank.neighbours import Neighbours, join_neighbours


@dataclass(frozen=True, slots=True)
class Mesh:
    """How the ranks of an attempt share the model.

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


def mesh_without_others(shape: MeshShape, device: torch.device) -> Mesh:
    """Make a mesh whose other ranks don't exist, to find out how much memory one of its ranks would need.

    Collectives return at once, as if all ranks had sent what this one sends: sizes are right, and values are wrong. The
    process is rank zero, and its default group is of this kind from then on.

    Args:
        shape: of the mesh.
        device: of this process.
    """
    # torch's own way to run one rank of many; it is part of its test tools
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=shape.num_ranks)
    assert dist.group.WORLD is not None
    device_mesh = _device_mesh(shape, device)
    return Mesh(shape, device_mesh, dist.group.WORLD, _group_with_other_samples(shape, device_mesh))


def form_mesh(
    shape: MeshShape, device: torch.device, store: Store, control: dist.ProcessGroup, timeout: timedelta
) -> Mesh:
    """Make the groups of a mesh, after the group of all ranks; collective.

    Args:
        shape: whose product is the number of ranks.
        device: of this rank.
        store: of the ranks.
        control: group of all ranks, on the CPU.
        timeout: bound on each collective.
    """
    device_mesh = _device_mesh(shape, device)
    same_stages = neighbours = None
    samples = _group_with_other_samples(shape, device_mesh)
    if shape.pipeline > 1:
        same_stages = _group_over(device_mesh, [name for name in shape.degrees if name != "pipeline"], "same_stages")
        neighbours = join_neighbours(shape, dist.get_rank(), control, device, timeout)
    for group in (*device_mesh.get_all_groups(), samples, same_stages):
        # torch gives a mesh's groups its own default of half an hour
        if group is not None:
            dist.distributed_c10d._set_pg_timeout(timeout, group)
    return Mesh(shape, device_mesh, gloo_group(store, timeout, SAVING), samples, same_stages, neighbours)


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
    own = [name for name in device_mesh.mesh_dim_names or () if name in names]
    if len(own) == 1:
        return device_mesh.get_group(own[0])
    return device_mesh[tuple(own)]._flatten(flattened).get_group()

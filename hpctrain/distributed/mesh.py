"""The mesh of an attempt: groups of ranks that hold a replica of the model together, and groups of replicas."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpctrain.config.mesh import MeshShape
from hpctrain.distributed.gloo_group import SAVING, gloo_group


@dataclass(frozen=True, slots=True)
class Mesh:
    """How the ranks of an attempt share the model.

    Attributes:
        shape: its degrees.
        device_mesh: torch's, with the dimension `shard`, after `replicate` if there are several replicas.
        saving: a gloo group of all ranks for the threads that write checkpoints: they exchange messages while the
            training thread uses the other groups.
    """

    shape: MeshShape
    device_mesh: DeviceMesh
    saving: dist.ProcessGroup


def form_mesh(shape: MeshShape, device: torch.device, store: Store, timeout: timedelta) -> Mesh:
    """Make the groups of a mesh, after the group of all ranks; collective.

    Args:
        shape: whose product is the number of ranks.
        device: of this rank.
        store: of the ranks.
        timeout: bound on each collective.
    """
    degrees = {name: degree for name, degree in shape.degrees.items() if degree > 1 or name == "shard"}
    device_mesh = init_device_mesh(device.type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    for group in device_mesh.get_all_groups():
        # torch gives a mesh's groups its own default of half an hour
        dist.distributed_c10d._set_pg_timeout(timeout, group)
    return Mesh(shape, device_mesh, gloo_group(store, timeout, SAVING))

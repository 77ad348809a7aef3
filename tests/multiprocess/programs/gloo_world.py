"""Join the world of a test's ranks, over gloo and on the CPU."""

from __future__ import annotations

import os

import torch

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.parallel.mesh import TrainingWorld, join_mesh
from hpctrain.rank.rendezvous import meet
from hpctrain.rank.world import join


def joined(*, backend: str = "gloo", init_method: str = "env://") -> TrainingWorld:
    """The world that this process's environment describes, which may be of one rank; collective."""
    environment = ClusterEnvironment.from_environment(os.environ)
    store = None
    if environment.world_size > 1:
        store = meet(environment, init_method=init_method, secret=b"s", token=environment.token, timeout_s=30)
    world = join(environment, store, backend=backend, devices=(torch.device("cpu"),), timeout_s=30)
    return join_mesh(world, None, 30)

"""A loss over the samples of all ranks, each with its share, and the same on one rank with all of them."""

import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.distributed.all_gather import all_gather_with_grad
from hpctrain.distributed.rendezvous import meet
from hpctrain.distributed.world import join


def gradients():
    """The encoder's gradients, flattened."""
    environment = ClusterEnvironment.from_environment(os.environ)
    rank, size = environment.rank, environment.world_size
    store = (
        meet(environment, init_method="env://", secret=b"s", token=environment.token, timeout_s=30)
        if size > 1
        else None
    )
    world = join(environment, store, backend="gloo", devices=(torch.device("cpu"),), timeout_s=30)
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    samples = torch.randn(8, 5, dtype=torch.float64).chunk(size)[rank]
    model = DistributedDataParallel(encoder) if size > 1 else encoder
    own = model(samples)
    everyone = all_gather_with_grad(own)
    assert everyone.shape == (8, 3)
    assert torch.equal(everyone[rank * len(own) : (rank + 1) * len(own)], own)
    labels = torch.arange(len(own)) + rank * len(own)
    nn.functional.cross_entropy(own @ everyone.T, labels).backward()
    world.close()
    return [value for parameter in encoder.parameters() for value in parameter.grad.flatten().tolist()]

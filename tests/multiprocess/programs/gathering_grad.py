"""A loss over the samples of all ranks, each with its share, and the same on one rank with all of them."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.parallel.all_gather import all_gather_with_grad
from tests.multiprocess.programs.gloo_world import joined


def gradients():
    """The encoder's gradients, flattened."""
    world = joined()
    rank, size = world.rank, world.size
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

"""A contrastive loss of two ranks, each with its half of the samples, and the same on one rank with all of them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.distributed.all_gather import all_gather_with_grad


def gradients(rank, world_size, meeting):
    """The encoder's gradients, flattened."""
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    samples = torch.randn(8, 5, dtype=torch.float64).chunk(world_size)[rank]
    model = DistributedDataParallel(encoder) if world_size > 1 else encoder
    own = model(samples)
    everyone = all_gather_with_grad(own)
    assert everyone.shape == (8, 3)
    assert torch.equal(everyone[rank * len(own) : (rank + 1) * len(own)], own)
    labels = torch.arange(len(own)) + rank * len(own)
    nn.functional.cross_entropy(own @ everyone.T, labels).backward()
    if world_size > 1:
        dist.destroy_process_group()
    return [value for parameter in encoder.parameters() for value in parameter.grad.flatten().tolist()]

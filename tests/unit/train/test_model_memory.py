from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from hpctrain.config.mesh import MeshShape
from hpctrain.config.optimizer import NamedOptimizer
from hpctrain.config.parallel import Parallel
from hpctrain.parallel.fsdp import FsdpReplica, ShardedLossModule
from hpctrain.parallel.local_part import local_part
from hpctrain.parallel.mesh import fake_world
from hpctrain.parallel.tensor_parallel import divide
from hpctrain.train.ema import Ema
from hpctrain.train.model_memory import model_memory
from hpctrain.train.optimizers import BuiltOptimizer

OPTIMIZERS = [
    *[(name, {}) for name in ("AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "NAdam", "Rprop")],
    *[("AdamW", {"amsgrad": True}), ("SGD", {"momentum": 0.9})],
]


class OwnOptimizer(torch.optim.SGD):
    """Counts its steps in an attribute."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure)


def built(optimizer):
    named = NamedOptimizer.__new__(NamedOptimizer)
    return BuiltOptimizer(settings=named, optimizer=optimizer, base_lr=1.0, groups=[])


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(100, 50), nn.BatchNorm1d(50))


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_the_state_of_torchs_optimizers_is_foreseen_and_nothing_is_changed(model, name, options):
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)
    draws, before = torch.get_rng_state(), [value.clone() for value in model.parameters()]
    states = len(optimizer.state)
    steps = []
    hook = register_optimizer_step_post_hook(lambda stepped, *_: steps.append(stepped))
    try:
        foreseen = model_memory([model], [built(optimizer)], None)
    finally:
        hook.remove()
    assert steps == []
    assert torch.equal(torch.get_rng_state(), draws)
    assert all(map(torch.equal, model.parameters(), before))
    assert len(optimizer.state) == states
    for value in model.parameters():
        value.grad = torch.ones_like(value)
    optimizer.step()
    after = model_memory([model], [built(optimizer)], None)
    held = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))
    assert after.optimizer == held
    assert foreseen.optimizer == pytest.approx(held, rel=0.01)  # without counters


def test_shares_of_a_rank(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    weights = 4 * (100 * 50 + 50 + 2 * 50)
    buffers = 4 * 2 * 50 + 8
    found = model_memory([model, model], [built(optimizer)], Ema(model, 0.9, None, list(model.parameters())))
    assert (found.weights, found.gradients, found.optimizer) == (weights + buffers, weights, 2 * weights)
    assert found.average >= weights
    model[0].weight.requires_grad_(False)
    assert model_memory([model], [], None).gradients == weights - 4 * 100 * 50


@pytest.fixture
def world():
    """Of four ranks, two of which compute each layer together; the others don't exist."""
    yield fake_world(MeshShape(1, 2, 2), (torch.device("cpu"),))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_ranks_keep_whole(world, dtype):
    """Whole are those of a rank's share of a divided layer."""
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6), nn.LayerNorm(6)).to(dtype)
    divide(model, {"0": ColwiseParallel(), "1": RowwiseParallel()}, world.mesh.tensor_mesh)
    fully_shard(model, mesh=world.mesh.data_mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    replica = FsdpReplica(ShardedLossModule(model), world, Parallel(kind="mesh", keep_gradients_whole=True))
    model.set_requires_gradient_sync(False)
    for _ in range(2):
        model(torch.ones(2, 6, dtype=dtype)).sum().backward()
    kept = model._get_fsdp_state()._fsdp_param_group.fsdp_params
    gradients = [
        each._unsharded_param.grad if each.unsharded_accumulated_grad is None else each.unsharded_accumulated_grad
        for each in kept
    ]
    held = sum(local_part(gradient).nbytes for gradient in gradients)
    elements = (6 * 5 + 5) + (5 * 6 + 6) + 2 * 6
    assert held == 4 * elements
    assert model_memory([model], [], None, partial(replica.gradient_bytes, accumulates=True)).gradients == held
    in_shards = (3 * 6 + 3) + (3 * 5 + 3) + 2 * 3
    assert model_memory([model], [], None).gradients == dtype.itemsize * in_shards


def test_an_optimizer_of_ones_own_is_not_tried(model):
    optimizer = OwnOptimizer(model.parameters(), lr=0.1)
    assert model_memory([model], [built(optimizer)], None).optimizer is None
    assert optimizer.steps == 0

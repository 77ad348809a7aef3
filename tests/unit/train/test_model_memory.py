from __future__ import annotations

import pytest
import torch
from torch import nn

from hpctrain.config.named_optimizers import NamedOptimizer
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
    return BuiltOptimizer(named=named, optimizer=optimizer, base_lr=1.0, groups=[])


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(100, 50), nn.BatchNorm1d(50))


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_the_state_of_torchs_optimizers_is_foreseen_and_nothing_is_changed(model, name, options):
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)
    draws, before = torch.get_rng_state(), [value.clone() for value in model.parameters()]
    states = len(optimizer.state)
    foreseen = model_memory([model], [built(optimizer)], None)
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


def test_an_optimizer_of_ones_own_is_not_tried(model):
    optimizer = OwnOptimizer(model.parameters(), lr=0.1)
    assert model_memory([model], [built(optimizer)], None).optimizer is None
    assert optimizer.steps == 0

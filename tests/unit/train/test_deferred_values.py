from __future__ import annotations

import pytest
import torch
from torch import nn

from hpctrain.train.deferred_values import deferred_values

CPU = torch.device("cpu")


class Kept(nn.Module):
    """Has a table that no checkpoint holds, a tied weight, and a part that its state dict leaves out."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.backbone = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("table", torch.rand(3, 5), persistent=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_state_dict_post_hook(self._without_backbone)

    @staticmethod
    def _without_backbone(module, state, prefix, _):
        for name in [name for name in state if "backbone" in name]:
            del state[name]


def tensors_of(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


@pytest.fixture
def empty_is_nan():
    """Memory that nothing has written to contains NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def expected():
    torch.manual_seed(3)
    return tensors_of(Kept())


@pytest.fixture
def built(empty_is_nan):
    torch.manual_seed(3)
    model, values = deferred_values(Kept)
    values.fill(nn.Sequential(model), model, CPU, of_buffers=CPU, leave_saved=True)
    return model, values


def test_what_a_checkpoint_provides_isnt_computed(built, expected):
    found = tensors_of(built[0])
    right = {name for name, value in found.items() if torch.equal(value, expected[name])}
    assert right == {"backbone.weight", "backbone.bias", "table"}
    assert all(value.isnan().all() for name, value in found.items() if name.startswith(("embedding", "norm.running")))


def test_the_random_state_is_that_of_an_ordinary_build(built):
    found = torch.get_rng_state()
    torch.manual_seed(3)
    Kept()
    assert torch.equal(found, torch.get_rng_state())


def test_without_a_checkpoint_the_rest_is_computed(built, expected):
    model, values = built
    with torch.no_grad():
        model.backbone.weight.fill_(8.0)
    values.fill_rest()
    found = tensors_of(model)
    assert torch.equal(found.pop("backbone.weight"), torch.full((5, 5), 8.0))
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert model.head.weight is model.embedding.weight

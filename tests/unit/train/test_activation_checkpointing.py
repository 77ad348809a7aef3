from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hpctrain.errors import ConfigError
from hpctrain.train.activation_checkpointing import checkpoint_activations


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.linear, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.4)

    def forward(self, x, *, scale=1.0):
        self.calls += 1
        return x + scale * self.dropout(torch.relu(self.norm(self.linear(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def trained(model, steps=4):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("patterns", [["blocks.*"], ["blocks.1", "head"]])
def test_weights_and_statistics_are_bit_equal_with_dropout_and_batch_norm(patterns):
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    checkpoint_activations(model, patterns)
    expected, found = trained(plain), trained(model)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert (plain.blocks[1].calls, model.blocks[1].calls) == (4, 8)


def test_names_are_matched_part_by_part_and_what_is_inside_is_left_alone():
    assert checkpoint_activations(Model(), ["blocks.*"]) == ["blocks.0", "blocks.1"]
    assert checkpoint_activations(Model(), ["blocks.?.l*", "head"]) == ["blocks.0.linear", "blocks.1.linear", "head"]
    assert checkpoint_activations(Model(), ["blocks.0", "blocks.0.linear"]) == ["blocks.0"]


def test_nothing_is_computed_again_without_gradients():
    model = Model()
    checkpoint_activations(model, ["blocks.*"])
    with torch.no_grad():
        model(torch.randn(8, 4))
    assert [block.calls for block in model.blocks] == [1, 1]


def test_a_list_of_modules_is_never_called():
    with pytest.raises(ConfigError, match=r"activation_checkpointing=blocks: has no forward.*; write blocks\.\*"):
        checkpoint_activations(Model(), ["blocks"])


def test_a_pattern_that_matches_nothing_names_what_there_is():
    with pytest.raises(ConfigError, match=r"activation_checkpointing=block\.\*: matches no module; .* blocks\.0"):
        checkpoint_activations(Model(), ["block.*"])


def test_a_batch_norm_that_is_to_be_compiled():
    with pytest.raises(ConfigError, match=r"activation_checkpointing=blocks\.0: holds a batch norm"):
        checkpoint_activations(Model(), ["blocks.*"], compiled=True)
    assert checkpoint_activations(Model(), ["blocks.*.linear"], compiled=True) == ["blocks.0.linear", "blocks.1.linear"]

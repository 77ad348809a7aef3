import pytest
from torch import nn

from hpctrain.errors import ConfigError
from hpctrain.models.gpt import GPT
from hpctrain.models.mlp import MLP
from hpctrain.models.resnet import ResNet
from hpctrain.parallel.blocks import find_blocks


class Stacks(nn.Module):
    """An encoder and a decoder, and a head whose weights are the encoder's embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.encoder = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        self.decoder = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.head = nn.Linear(4, 8)


def test_the_repeated_modules_of_a_gpt_are_its_blocks():
    assert list(find_blocks(GPT(num_layers=3))) == ["blocks.0", "blocks.1", "blocks.2"]


def test_several_stacks_and_dicts_of_modules_are_found():
    assert list(find_blocks(Stacks())) == ["encoder.0", "encoder.1", "decoder.a", "decoder.b"]


@pytest.mark.parametrize("make", [MLP, ResNet, GPT])
def test_each_model_of_ours_has_blocks_that_do_not_overlap(make):
    model = make()
    blocks = find_blocks(model)
    assert len(blocks) > 1
    inside = [id(parameter) for block in blocks.values() for parameter in block.parameters()]
    assert len(inside) == len(set(inside))


def test_a_sequence_is_cut_where_its_members_are_alike():
    assert list(find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))) == ["0", "2"]
    assert not find_blocks(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))


def test_a_block_that_shares_a_parameter_with_the_rest_is_left_out():
    model = Stacks()
    model.decoder["b"].weight = model.decoder["a"].weight
    model.encoder[0][0].weight = model.head.weight = nn.Parameter(model.encoder[0][0].weight.detach())
    assert list(find_blocks(model)) == ["encoder.1"]
    with pytest.raises(ConfigError, match=r"shares parameters with the rest of the model: encoder.0"):
        find_blocks(model, ["encoder.*"])


def test_names_choose_other_blocks_and_the_outer_one_counts():
    assert list(find_blocks(Stacks(), ["encoder.*.0", "encoder.0", "head"])) == ["encoder.0", "encoder.1.0", "head"]


@pytest.mark.parametrize("pattern", ["layers.*", "encoder.0.1"])
def test_a_name_that_matches_nothing_with_parameters_is_refused(pattern):
    with pytest.raises(ConfigError, match=r"parallel.blocks=.*matches no module with parameters") as refused:
        find_blocks(Stacks(), ["encoder.0", pattern])
    assert "encoder.0" in str(refused.value)

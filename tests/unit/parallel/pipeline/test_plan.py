"""How a model is cut into stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpctrain.errors import ConfigError, TaskError
from hpctrain.models.convnet import ConvNet
from hpctrain.models.gpt import GPT
from hpctrain.models.mlp import MLP
from hpctrain.models.resnet import ResNet
from hpctrain.parallel.pipeline.plan import find_plan, stages_of
from hpctrain.parallel.pipeline.random_streams import RandomStreams
from hpctrain.parallel.pipeline.stages import Stages

GPT_PLAN = [("tokens", "places", "dropout"), "blocks.*", ("norm", "head", "tokens")]


class Bare:
    """A task without a plan."""


class Planned(nn.Module):
    def __init__(self, plan: object) -> None:
        super().__init__()
        self.into = nn.Linear(2, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.register_buffer("scale", torch.ones(1))
        self.plan = plan

    def pipeline_plan(self) -> object:
        return self.plan


def gpt(**sizes: int) -> GPT:
    with torch.device("meta"):
        return GPT(**{"vocab_size": 50, "num_layers": 6, "width": 16, "num_heads": 2, **sizes})


def test_the_plan_of_the_task_goes_before_that_of_the_model() -> None:
    model = Planned(["into"])
    assert find_plan(model, Bare(), 2) == ["into"]
    assert find_plan(model, Planned(("layers.*",)), 2) == ["layers.*"]
    assert find_plan(model, Planned(None), 2) == ["into"]


def test_a_sequence_needs_no_plan() -> None:
    assert find_plan(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), Bare(), 2) == ["0", "1"]


def test_another_model_without_a_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Linear isn't an nn.Sequential, and neither it nor Bare has a plan; define"):
        find_plan(nn.Linear(1, 1), Bare(), 2)


@pytest.mark.parametrize("plan", ["into", [3], [()], [["into", 2]]])
def test_what_is_no_plan_is_refused(plan: object) -> None:
    with pytest.raises(TaskError, match=r"Planned\.pipeline_plan must return a list of names"):
        find_plan(Planned(plan), Bare(), 2)


def test_patterns_are_an_entry_for_each_module_and_tuples_stay_together() -> None:
    assert stages_of(gpt(), GPT_PLAN, 2) == [
        ["tokens", "places", "dropout", "blocks.0", "blocks.1", "blocks.2"],
        ["blocks.3", "blocks.4", "blocks.5", "norm", "head", "tokens"],
    ]


def test_a_name_that_one_stage_has_twice_is_there_once() -> None:
    assert stages_of(gpt(num_layers=1), GPT_PLAN, 1) == [["tokens", "places", "dropout", "blocks.0", "norm", "head"]]


def test_embeddings_count_where_they_are_multiplied() -> None:
    """The last stage has a product with a large vocabulary, and the first one only looks tokens up."""
    stages = stages_of(gpt(vocab_size=800), GPT_PLAN, 3)
    assert stages[0][-1] == "blocks.2"
    assert stages[2] == ["norm", "head", "tokens"]


def test_the_largest_stage_is_as_small_as_possible() -> None:
    layers = [nn.Linear(1, size, bias=False) for size in (7, 1, 1, 5, 4, 2, 2)]
    found = stages_of(nn.Sequential(*layers), [str(number) for number in range(7)], 3)
    assert found == [["0"], ["1", "2", "3"], ["4", "5", "6"]]


def test_stages_begin_where_the_configuration_says() -> None:
    found = stages_of(gpt(), GPT_PLAN, 3, ["blocks.1", "norm"])
    assert [own[0] for own in found] == ["tokens", "blocks.1", "norm"]
    for begins in (["blocks.1", "blocks.1"], ["norm", "blocks.2"], ["attention", "norm"]):
        with pytest.raises(ConfigError, match=r"parallel\.stages=.*isn't the first module of an entry of the plan"):
            stages_of(gpt(), GPT_PLAN, 3, begins)


def test_more_stages_than_entries_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs 9 stages, and the plan of GPT has 8 entries"):
        stages_of(gpt(), GPT_PLAN, 9)


def test_a_plan_names_all_parameters_and_buffers() -> None:
    with pytest.raises(TaskError, match=r"pipeline_plan leaves out norm\.running_mean, .*: name the modules"):
        stages_of(Planned(None), ["into", "layers.*"], 1)
    with pytest.raises(TaskError, match=r"pipeline_plan names layer\.\*, which matches nothing in the model"):
        stages_of(Planned(None), ["into", "layer.*"], 2)
    assert stages_of(Planned(None), [("into", "norm"), "layers.*"], 2)[1][-1] == "layers.3"


def test_a_stage_begins_with_a_module_that_has_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Dropout(), nn.Linear(2, 2), nn.ReLU())
    assert stages_of(model, ["0", "1", "2", "3", "4"], 2) == [["0", "1", "2"], ["3", "4"]]


@pytest.mark.parametrize(
    "model", [ConvNet(width=4), MLP(num_layers=4), ResNet(18, num_classes=3)], ids=lambda model: type(model).__name__
)
def test_stages_of_hpctrains_models_compute_the_model(model: nn.Module) -> None:
    torch.manual_seed(0)
    model.eval()
    images = (
        torch.randn(2, 64) if isinstance(model, MLP) else torch.randn(2, 3 if isinstance(model, ResNet) else 1, 32, 32)
    )
    streams, given = RandomStreams(0, ()), None
    names = stages_of(model, find_plan(model, Bare(), 3), 3)
    for position in range(3):
        with streams.of_task(0):
            given = Stages(model, names, position, 3).compute(
                0, lambda model: model(images), lambda given=given: given, streams, model
            )
    torch.testing.assert_close(given, model(images), rtol=0, atol=0)


def test_a_plan_names_all_modules_that_are_called() -> None:
    """A module that no stage has would be called in each of them."""

    class Activated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
            self.activation = nn.Tanh()

    with pytest.raises(
        TaskError, match="pipeline_plan leaves out activation: name all modules that a forward pass calls"
    ):
        stages_of(Activated(), ["layers.*"], 2)

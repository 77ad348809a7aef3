from __future__ import annotations

import pytest

from hpctrain.config.compose import Composer
from hpctrain.errors import ConfigError

TP = ("parallel=tp", "cluster.processes_per_node=2")
PP = ("parallel=pp", "cluster.processes_per_node=2")
SOURCE = """\
import torch
from torch import nn

from hpctrain.models.convnet import ConvNet
from hpctrain.models.gpt import GPT
from hpctrain.tasks import Task
from hpctrain.tasks.digits import Digits


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)


class Sequence(nn.Sequential):
    pass


class Own(Digits):
    {}
"""


@pytest.fixture
def compose(tmp_path, monkeypatch):
    """Composes the configuration of a task with this statement in its class."""
    monkeypatch.chdir(tmp_path)
    composer = Composer()

    def with_statement(statement, *words, after="", parallel=TP):
        (tmp_path / "own_plans.py").write_text(SOURCE.format(statement) + after)
        return composer.compose(["task=custom", "task._target_=own_plans.Own", *parallel, *words])

    return with_statement


@pytest.mark.parametrize(
    ("statement", "words", "model"),
    [
        ("pass", ["model=mlp"], "MLP"),
        ("pass", ["model=own"], "ConvNet"),
        ("def build_model(self): return ConvNet()", [], "ConvNet"),
        ("def build_model(self): return nn.Sequential(Layered(), Layered())", [], "Sequential"),
        ("def build_model(self): return Layered()", [], "Layered"),
        ("pass", ["model._target_=own_plans.Layered"], "Layered"),
    ],
)
def test_it_is_certain_that_there_is_no_plan(compose, statement, words, model):
    with pytest.raises(ConfigError, match=f"neither {model} nor Own has a plan") as found:
        compose(statement, *words)
    assert found.value.key == "parallel.tensor_degree"
    assert "large_models.md" in found.value.remedy


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("pass", ["model=gpt"]),
        ("def build_model(self): return GPT()", []),
        ("def tensor_parallel_plan(self): return {}", ["model=mlp"]),
        ("tensor_parallel_plan = None", ["model=mlp"]),
        ("def __getattr__(self, name): ...", ["model=mlp"]),
        ("def build_model(self): return torch.load('model.pt')", []),
        ("def build_model(self): return build()", []),
        ("def build_model(self):\n        model = Layered()\n        return model", []),
        ("build_model = Digits.build_model", []),
    ],
)
def test_nothing_is_refused_that_may_have_one(compose, statement, words):
    assert compose(statement, *words).parallel.tensor_degree == -1


@pytest.mark.parametrize(
    "after",
    [
        "Layered.tensor_parallel_plan = None\n",
        "print(Layered)\n",
        "print(end=Layered)\n",
        "for one in (Layered,):\n    print(one)\n",
        "globals()\n",
    ],
)
def test_a_module_may_give_a_plan_to_a_class(compose, after):
    assert compose("def build_model(self): return Layered()", after=after).parallel.tensor_degree == -1


@pytest.mark.parametrize(
    ("statement", "words", "model"),
    [
        ("def build_model(self): return Layered()", [], "Layered"),
        ("def tensor_parallel_plan(self): return {}", ["model._target_=own_plans.Layered"], "Layered"),
        ("pass", ["model._target_=torch.nn.Bilinear"], "Bilinear"),
    ],
)
def test_it_is_certain_that_there_is_no_plan_for_a_pipeline(compose, statement, words, model):
    with pytest.raises(
        ConfigError, match=f"{model} isn't an nn.Sequential, and neither it nor Own has a plan"
    ) as found:
        compose(statement, *words, parallel=PP)
    assert found.value.key == "parallel.pipeline_degree"
    assert "define pipeline_plan in one of them" in found.value.remedy


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("pass", ["model=mlp"]),
        ("def pipeline_plan(self): return ['layer']", ["model._target_=own_plans.Layered"]),
        ("def build_model(self): return nn.Sequential(Layered(), Layered())", []),
        ("def build_model(self): return Sequence(Layered(), Layered())", []),
        ("def build_model(self): return build()", []),
        ("def build_model(self): return nn.SyncBatchNorm.convert_sync_batchnorm(Layered())", []),
        ("def build_model(self): return nn.utils.skip_init(Layered)", []),
    ],
)
def test_no_pipeline_is_refused_whose_model_may_be_cut(compose, statement, words):
    assert compose(statement, *words, parallel=PP).parallel.pipeline_degree == -1

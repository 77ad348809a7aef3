from __future__ import annotations

import pytest
from torch import nn

from hpctrain.errors import ConfigError
from hpctrain.tasks import Task
from hpctrain.train.task_class import check_class


class Plain(Task):
    def train_dataset(self): ...

    def loss(self, model, batch): ...


class WithoutData(Task):
    def loss(self, model, batch): ...


class OfLightning(Plain, nn.Module):
    def validation_step(self, batch, index): ...


class Misspelt(Plain):
    def evalute(self, model, batch): ...


class Unfit(Plain):
    def loss(self, batch): ...


class Model(Plain, nn.Module):
    def __init__(self):
        super().__init__()
        self.setup()

    def forward(self, features):
        return [self.prepared(each) for each in features]

    def setup(self): ...

    def prepared(self, features): ...


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (WithoutData, "has no method train_dataset"),
        (OfLightning, "has validation_step, .*define evaluate"),
        (Misspelt, "has evalute, .*did you mean evaluate"),
        (Unfit, r"its loss can't be called: .*write def loss\(self, model, batch\)"),
    ],
)
def test_a_class_with_a_mistake_is_refused(kind, problem):
    with pytest.raises(ConfigError, match=problem):
        check_class(kind, "__main__.Own")


def test_a_task_may_be_the_model_and_call_methods_of_its_own():
    check_class(Model, "__main__.Own")

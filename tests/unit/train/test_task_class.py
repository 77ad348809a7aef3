from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from hpctrain.errors import ConfigError
from hpctrain.tasks import Task
from hpctrain.train.build import check_class


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


class UnfitGenerator(Plain):
    def loss1(self, batch): ...


class Model(Plain, nn.Module):
    def __init__(self):
        super().__init__()
        self.setup()

    def forward(self, features):
        return [self.prepared(each) for each in features]

    def setup(self): ...

    def prepared(self, features): ...


class TwoLosses(Plain):
    def loss1(self, model, batch): ...

    def training_step(self, model, batch): ...


class Decorated(Plain):
    @torch.no_grad()
    def evaluate(self, model, batch):
        return self.validation_step(model, batch)

    def validation_step(self, model, batch): ...


class OfProperty(Plain):
    @property
    def folder(self):
        return self.setup()

    def setup(self): ...


class OfSetter(Plain):
    folder = property()

    @folder.setter
    def folder(self, path):
        self.setup()

    def setup(self): ...


class OfCachedProperty(Plain):
    @functools.cached_property
    def folder(self):
        return self.setup()

    def setup(self): ...


class Remote:
    """Fails at an attribute that it lacks with an error of its own."""

    def __getattr__(self, name):
        raise AttributeError(name) if name.startswith("__") else LookupError(name)


class OfRemote(Plain):
    client = Remote()


class OfClassMethod(Plain):
    @classmethod
    def make(cls):
        return cls().setup()

    def setup(self): ...


class Mixin:
    def build_model(self):
        self.setup()


class OfMixin(Mixin, Plain):
    def setup(self): ...


def scaled(method):
    @functools.wraps(method)
    def with_scale(self, model, batch):
        return method(self, model, batch, 2.0)

    return with_scale


class Scaled(Plain):
    @scaled
    def loss(self, model, batch, scale): ...


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (WithoutData, "has no method train_dataset"),
        (Unfit, r"its loss can't be called: .*write def loss\(self, model, batch\)"),
        (UnfitGenerator, r"its loss1 can't be called: .*write def loss1\(self, model, batch\)"),
    ],
)
def test_a_class_with_a_mistake_is_refused(kind, problem):
    with pytest.raises(ConfigError, match=problem):
        check_class(kind, "__main__.Own", ["loss", "loss1"])


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (OfLightning, "has validation_step, which hpctrain does not call: define evaluate"),
        (Misspelt, "has evalute, which hpctrain does not call: did you mean evaluate?"),
    ],
)
def test_a_method_that_only_other_code_can_call_is_warned_of(kind, problem, caplog):
    check_class(kind, "__main__.Own", ["loss"])
    (record,) = caplog.records
    assert problem in record.message


@pytest.mark.parametrize(
    "kind",
    [Model, TwoLosses, Decorated, OfProperty, OfSetter, OfCachedProperty, OfRemote, OfClassMethod, OfMixin, Scaled],
)
def test_losses_and_methods_that_the_class_calls_itself_are_accepted(kind, caplog):
    check_class(kind, "__main__.Own", ["loss1", "training_step"])
    assert not caplog.records

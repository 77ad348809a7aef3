from __future__ import annotations

import pytest
from torch import nn

from hpctrain.train.modes import (
    Modes,
    begin_training,
    describe_evaluation_mode,
    evaluation_mode,
    names_in_evaluation_mode,
)


class Backbone(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Sequential(nn.Dropout(), nn.Linear(2, 2))


class Freezing(Model):
    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self


class FreezingItself(Backbone):
    def train(self, mode=True):
        return super().train(False)


class Exported(nn.Linear):
    """As `torch.export.export(...).module()` is, whose making takes seconds."""

    def train(self, mode=True):
        raise NotImplementedError("Calling train() is not supported yet.")


BACKBONE = ["backbone", "backbone.0", "backbone.1", "backbone.2"]


def test_a_model_that_was_built_in_evaluation_mode_is_trained_in_train_mode():
    model = Model().eval()
    assert begin_training(model)
    assert names_in_evaluation_mode(model) == []


def test_a_part_that_was_built_in_evaluation_mode_stays_in_it():
    model = Model()
    model.backbone.eval()
    assert not begin_training(model)
    assert names_in_evaluation_mode(model) == BACKBONE


@pytest.mark.parametrize("built_in_evaluation_mode", [False, True])
def test_train_is_called_where_a_class_overrides_it(built_in_evaluation_mode):
    model = Freezing()
    model.training = not built_in_evaluation_mode
    assert begin_training(model) is built_in_evaluation_mode
    assert names_in_evaluation_mode(model) == BACKBONE


def test_an_override_switches_nothing_on_that_was_built_in_evaluation_mode():
    model = Freezing()
    model.head[0].eval()
    begin_training(model)
    assert names_in_evaluation_mode(model) == [*BACKBONE, "head.0"]


def test_train_is_called_for_an_inner_module_that_overrides_it():
    model = Model()
    model.backbone = FreezingItself()
    begin_training(model)
    assert names_in_evaluation_mode(model) == BACKBONE


def test_a_part_whose_own_train_does_nothing_stays_frozen_even_in_a_model_in_evaluation_mode():
    model = Model().eval()
    model.backbone.train = lambda mode=True: model.backbone
    begin_training(model)
    assert names_in_evaluation_mode(model) == BACKBONE


def test_a_module_that_has_no_modes_can_be_trained_and_evaluated():
    model = Model()
    model.backbone = Exported(2, 2)
    assert not begin_training(model)
    assert not begin_training(model.backbone)
    before = names_in_evaluation_mode(model)
    with evaluation_mode(model):
        assert not any(module.training for module in model.modules())
    assert names_in_evaluation_mode(model) == before


@pytest.mark.parametrize("kind", [Model, Freezing])
def test_after_an_evaluation_every_module_is_in_its_own_mode(kind):
    model = kind()
    begin_training(model)
    model.backbone[0].train()
    model.head[0].eval()
    before = names_in_evaluation_mode(model)
    with evaluation_mode(model):
        assert not any(module.training for module in model.modules())
    assert names_in_evaluation_mode(model) == before


def test_saved_modes_are_restored_by_name_whatever_the_wrappers():
    model = Freezing()
    begin_training(model)
    model.backbone[2].train()
    saved = names_in_evaluation_mode(model)
    again = Freezing().eval()
    again.backbone[1] = nn.DataParallel(again.backbone[1])
    Modes(again).load_state({"evaluation_mode": [*saved, "gone"]})
    assert names_in_evaluation_mode(again) == ["backbone", "backbone.0", "backbone.1", "backbone.1"]
    assert [again.backbone[2].training, again.head[0].training] == [True, True]


def test_the_description_names_a_frozen_part_once():
    model = Model()
    assert describe_evaluation_mode(model) == ""
    model.backbone.eval()
    model.head.training = False
    assert describe_evaluation_mode(model) == "5 of 8 modules: backbone, head"
    model.backbone[0].train()
    assert describe_evaluation_mode(model) == "4 of 8 modules: backbone, backbone.1, backbone.2, head"
    model.backbone[0].eval()
    model.eval()
    assert describe_evaluation_mode(model) == "8 of 8 modules: (the model)"

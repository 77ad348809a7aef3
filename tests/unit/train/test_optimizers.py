from __future__ import annotations

import pytest
import torch
from torch import nn

from hpctrain.errors import ConfigError, TaskError
from hpctrain.train.optimizers import build_optimizers
from hpctrain.train.parameter_groups import freeze, layer_factors


def build_optimizer(node, model, batch):
    (only,) = build_optimizers(node, model, batch)
    return only


def built(node, model, batch):
    return build_optimizer(node, model, batch).optimizer


def test_the_optimizer_has_what_requires_a_gradient():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    optimizer = built({"_target_": "torch.optim.SGD", "lr": 0.25}, model, 64)
    (group,) = optimizer.param_groups
    assert [id(parameter) for parameter in group["params"]] == [id(parameter) for parameter in model[1].parameters()]
    assert group["lr"] == 0.25
    model.requires_grad_(False)
    with pytest.raises(TaskError, match="nothing to train"):
        built({"_target_": "torch.optim.SGD", "lr": 0.25}, model, 64)


def test_an_optimizer_must_be_one():
    with pytest.raises(TaskError, match=r"optimizer\._target_=torch\.nn\.ParameterList made a ParameterList"):
        built({"_target_": "torch.nn.ParameterList"}, nn.Linear(1, 1), 64)


@pytest.mark.parametrize(
    "name", ["RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop", "Adam"]
)
def test_any_optimizer_of_torchs(name):
    model = nn.Linear(2, 3)
    optimizer = built({"_target_": f"torch.optim.{name}", "lr": 0.25}, model, 64)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert type(optimizer).__name__ == name
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_an_optimizer_over_many_parameters_at_a_time(how):
    options = {"_target_": "torch.optim.AdamW", "lr": 0.25, "foreach": None, "fused": None}
    optimizer = built({**options, how: True}, nn.Linear(2, 3), 64)
    assert optimizer.param_groups[0][how] is True


def test_an_optimizer_that_needs_a_closure():
    with pytest.raises(ConfigError, match=r"optimizer\._target_=torch\.optim\.LBFGS: .* closure"):
        built({"_target_": "torch.optim.LBFGS"}, nn.Linear(1, 1), 64)


@pytest.mark.parametrize(("scaling", "expected"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_the_learning_rate_is_that_of_the_global_batch(scaling, expected):
    node = {"_target_": "torch.optim.SGD", "lr": 0.1, "lr_scaling": scaling, "lr_base_batch_size": 128}
    (group,) = built(node, nn.Linear(1, 1), 512).param_groups
    assert group["lr"] == group["initial_lr"] == pytest.approx(expected)


class OnDevice(torch.optim.Adam):
    def __init__(self, params, lr):
        super().__init__(params, lr=torch.tensor(lr))


def test_a_rate_that_is_a_tensor_belongs_to_one_group_and_what_it_starts_from_stays():
    node = {"_target_": f"{__name__}.OnDevice", "lr": 0.25, "groups": [{"match": "bias", "eps": 1.0}]}
    first, second = built(node, nn.Linear(1, 1), 64).param_groups
    first["lr"].fill_(0.5)
    assert (first["lr"].item(), second["lr"].item()) == (0.5, 0.25)
    assert first["initial_lr"] == second["initial_lr"] == 0.25


def test_no_decay_for_norms_and_biases():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(4, 3))
    node = {"_target_": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.5, "no_decay_norm_bias": True}
    decayed, spared = built(node, model, 64).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [names[id(p)] for p in decayed["params"]] == ["0.weight", "2.weight"]
    assert [names[id(p)] for p in spared["params"]] == ["0.bias", "1.weight", "1.bias", "2.bias"]
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.5, 0.0)
    assert decayed["initial_lr"] == spared["initial_lr"] == 0.1


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)


def names(model, group):
    found = {id(parameter): name for name, parameter in model.named_parameters()}
    return [found[id(parameter)] for parameter in group["params"]]


ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.5}


def test_the_first_entry_that_matches_decides_and_the_others_come_first():
    model = Backbone()
    groups = [
        {"match": "blocks.0.*", "lr_factor": 0.25},
        {"match": ["blocks.*", "embedding.*"], "lr": 0.05, "weight_decay": 0.0},
    ]
    found = build_optimizer({**ADAMW, "groups": groups}, model, 64)
    others, first, second = found.optimizer.param_groups
    assert names(model, others) == ["head.weight", "head.bias"]
    assert names(model, first) == ["blocks.0.weight", "blocks.0.bias"]
    assert names(model, second)[0] == "embedding.weight"
    assert [(group["initial_lr"], group["weight_decay"]) for group in (others, first, second)] == [
        (0.1, 0.5),
        (0.1 * 0.25, 0.5),
        (0.05, 0.0),
    ]
    assert found.base_lr == 0.1


def test_groups_and_parameters_that_are_spared_weight_decay():
    model = Backbone()
    node = {**ADAMW, "no_decay_norm_bias": True, "groups": [{"match": "blocks.*", "lr_factor": 0.5}]}
    found = [
        (len(group["params"]), group["lr"], group["weight_decay"]) for group in built(node, model, 64).param_groups
    ]
    assert found == [(2, 0.1, 0.5), (1, 0.1, 0.0), (3, 0.05, 0.5), (3, 0.05, 0.0)]


def test_frozen_parameters_are_in_no_optimizer():
    model = Backbone()
    node = {**ADAMW, "groups": [{"match": "blocks.*", "frozen": True}]}
    freeze(node, model)
    assert not any(parameter.requires_grad for parameter in model.blocks.parameters())
    found = build_optimizer(node, model, 64)
    (others,) = found.optimizer.param_groups
    assert names(model, others) == ["embedding.weight", "head.weight", "head.bias"]
    assert [(group.label, len(group.parameters), group.frozen) for group in found.groups] == [
        ("(others)", 3, False),
        ("blocks.*", 6, True),
    ]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [{"match": "block.*"}],
            r"groups\[0\]\.match=block\.\*: matches no parameter.*did you mean blocks\.\*",
        ),
        ([{"match": ["head.*", "zzz"]}], r"match=zzz: .*; it has embedding\.\*, blocks\.\*, head"),
        ([{"match": "*"}, {"match": "head.*"}], r"groups\[1\].*earlier entries already have all parameters"),
        ([{"match": "head.*", "momentum": 0.5}], r"groups\[0\]\.momentum=0\.5: is not an option of a group of AdamW"),
    ],
)
def test_entries_that_change_nothing_are_refused(groups, message):
    with pytest.raises(ConfigError, match=message):
        build_optimizer({**ADAMW, "groups": groups}, Backbone(), 64)


def test_an_entry_for_what_the_model_froze_itself():
    model = Backbone()
    model.head.requires_grad_(False)
    with pytest.raises(ConfigError, match="the model itself has frozen all parameters"):
        build_optimizer({**ADAMW, "groups": [{"match": "head.*", "lr_factor": 0.1}]}, model, 64)


def test_a_tied_weight_has_each_of_its_names():
    model = Backbone()
    model.tied = model.embedding
    found = built({**ADAMW, "groups": [{"match": "tied.*", "lr_factor": 0.5}]}, model, 64).param_groups
    assert names(model, found[1]) == ["embedding.weight"]


def test_the_learning_rate_decays_over_the_layers():
    model = Backbone()
    found = built({**ADAMW, "layer_decay": 0.5, "layer_decay_module": "blocks"}, model, 64).param_groups
    rates = {name: group["lr"] for group in found for name in names(model, group)}
    expected = {"embedding": 0.5**4, "blocks.0": 0.5**3, "blocks.1": 0.5**2, "blocks.2": 0.5, "head": 1.0}
    for name, rate in rates.items():
        assert rate == pytest.approx(0.1 * expected[name.rpartition(".")[0]])


def test_blocks_by_a_pattern_and_a_list_that_is_not_there():
    names = ["net.encoder.layer.0.mlp.3.w", "net.encoder.layer.1.mlp.3.w"]
    assert list(layer_factors(names, 0.5, "*.layer", "optimizer").values()) == [0.25, 0.5]
    with pytest.raises(ConfigError, match=r"layer_decay_module=blocks: .* numbered modules are in net\.encoder\.layer"):
        layer_factors(names, 0.5, "blocks", "optimizer")


def several(**named):
    return {"named": {name: {"_target_": "torch.optim.SGD", **entry} for name, entry in named.items()}}


def test_optimizers_by_name_share_the_parameters_among_them():
    model = Backbone()
    node = several(
        matrices={"match": "*", "ndim": 2, "exclude": ["embedding.*", "head.*"], "momentum": 0.5},
        rest={"_target_": "torch.optim.AdamW", "weight_decay": 0.25, "no_decay_norm_bias": True},
    )
    node |= {"lr": 0.25, "betas": [0.5, 0.75], "weight_decay": 0.5}
    first, second = build_optimizers(node, model, 64)
    assert names(model, first.optimizer.param_groups[0]) == [f"blocks.{number}.weight" for number in range(3)]
    assert [names(model, group) for group in second.optimizer.param_groups] == [
        ["embedding.weight", "head.weight"],
        [f"blocks.{number}.bias" for number in range(3)] + ["head.bias"],
    ]
    assert (first.base_lr, second.base_lr) == (0.25, 0.25)
    assert (first.optimizer.defaults["weight_decay"], first.optimizer.defaults["momentum"]) == (0.5, 0.5)
    assert (second.optimizer.defaults["betas"], second.optimizer.defaults["weight_decay"]) == ((0.5, 0.75), 0.25)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (
            {"a": {"match": "head.*"}},
            r"optimizer\.named=a: no optimizer trains embedding\.weight, .* and 4 more; match them",
        ),
        (
            {"a": {"match": "head.*"}, "b": {"match": ["*.bias", "*.weight"]}},
            r"named\.b\.match=.*: head\.weight also belongs to optimizer\.named\.a; .*named\.b\.exclude",
        ),
        ({"a": {"match": "*"}, "b": {}}, r"named\.b\.match=null: the other optimizers match all parameters"),
        ({"a": {"match": "*", "ndim": 4}, "b": {}}, r"named\.a\.match=\*: matches no parameter .* with ndim=4"),
        ({"a": {"match": "hed.*"}, "b": {}}, r"named\.a\.match=hed\.\*: matches no parameter.*did you mean head\.\*"),
    ],
)
def test_a_parameter_belongs_to_exactly_one_optimizer(named, message):
    with pytest.raises(ConfigError, match=message):
        build_optimizers(several(**named), Backbone(), 64)


def test_groups_of_an_optimizer_match_its_own_parameters_only():
    node = several(a={"match": "head.*", "groups": [{"match": "blocks.*", "lr_factor": 0.5}]}, b={})
    with pytest.raises(
        ConfigError, match=r"a\.groups\[0\]\.match=blocks\.\*: matches only parameters of other optimizers"
    ):
        build_optimizers(node, Backbone(), 64)


def test_an_optimizer_whose_groups_are_all_frozen_is_refused():
    node = several(a={"match": "head.*", "groups": [{"match": "head.*", "frozen": True}]}, b={})
    with pytest.raises(ConfigError, match=r"^optimizer\.named\.a\.groups\[0\]\.frozen=True: freezes all parameters"):
        freeze(node, Backbone())


def test_parameters_that_a_named_optimizer_freezes_need_no_other():
    model = Backbone()
    node = several(a={"match": ["head.*", "embedding.*"], "groups": [{"match": "embedding.*", "frozen": True}]}, b={})
    freeze(node, model)
    first, _ = build_optimizers(node, model, 64)
    assert [names(model, group) for group in first.optimizer.param_groups] == [["head.weight", "head.bias"]]
    assert not model.embedding.weight.requires_grad

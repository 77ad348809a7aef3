from types import SimpleNamespace

import pytest
from torch import nn

from hpctrain.errors import ConfigError
from hpctrain.train.build_learning_rate import Span, build_learning_rate
from hpctrain.train.build_step import _require_own_rates, _unfreeze_step
from hpctrain.train.optimizers import build_optimizers
from hpctrain.train.update import Update

ONE_CYCLE = {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.3}


def require_own_rates(schedule, **rates):
    named = {name: {"_target_": "torch.optim.SGD", "lr": lr} for name, lr in rates.items()}
    named["first"]["match"] = "weight"
    optimizers = build_optimizers({"named": named}, nn.Linear(2, 3), 64)
    updates = [
        Update(
            each.optimizer,
            build_learning_rate("schedule", schedule, each.optimizer, Span(10, 5), base_lr=each.base_lr),
            name=each.settings.name,
        )
        for each in optimizers
    ]
    _require_own_rates(optimizers, updates, SimpleNamespace(schedule=schedule))


def test_rates_of_optimizers_that_one_scheduler_would_make_the_same_are_refused():
    with pytest.raises(ConfigError, match=r"^schedule\._target_=.*OneCycleLR: .*optimizer\.named\.first\.schedule"):
        require_own_rates(ONE_CYCLE, first=0.1, second=0.2)
    require_own_rates(ONE_CYCLE, first=0.1, second=0.1)
    factors = {"_target_": "torch.optim.lr_scheduler.ExponentialLR", "gamma": 0.5}
    require_own_rates(factors, first=0.1, second=0.2)


def test_unfreezing_at_an_epoch_needs_the_length_of_the_data():
    node = {"_target_": "torch.optim.SGD", "lr": 0.1, "groups": [{"match": "weight", "unfreeze_at_epoch": 0.5}]}
    (built,) = build_optimizers(node, nn.Linear(2, 3), 64)
    assert [_unfreeze_step(group, Span(10, 6)) for group in built.groups] == [0, 3]
    with pytest.raises(
        ConfigError, match=r"^optimizer\.groups\[0\]\.unfreeze_at_epoch=0\.5: .*; use unfreeze_at_step$"
    ):
        _unfreeze_step(built.groups[1], Span(10, None))

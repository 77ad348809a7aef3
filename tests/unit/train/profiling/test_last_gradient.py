from __future__ import annotations

import torch
from torch import nn

from hpctrain.train.profiling.last_gradient import LastGradient


def test_it_is_the_first_layers_and_from_then_on_the_only_one_watched():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    last, told = LastGradient(model.parameters()), []
    features = torch.ones(2, 4)
    for expected in (6, 1, 1):
        loss = model(features).sum()
        last.watch(lambda: told.append(1))
        loss.backward()
        assert last.settle()
        assert len(told) == expected
        told.clear()
    model(features).sum().backward()
    assert told == []
    assert not last.settle()


def test_where_that_one_gets_none_all_are_watched_again():
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    last, told = LastGradient([*first.parameters(), *second.parameters()]), []
    features = torch.ones(1, 2)
    found = []
    for both in (True, False, False, True):
        loss = second(first(features) if both else features).sum()
        last.watch(lambda: told.append(1))
        loss.backward()
        found.append((last.settle(), len(told)))
        told.clear()
    assert found[:3] == [(True, 4), (False, 0), (True, 2)]


def test_parameters_that_learn_nothing_are_left_alone():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    last = LastGradient(frozen.parameters())
    last.watch(lambda: None)
    assert not last.settle()

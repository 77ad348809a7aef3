from __future__ import annotations

import copy

import pytest
import torch

from hpctrain.tasks import Metric


class Range(Metric):
    def __init__(self):
        self.add_state("lowest", torch.tensor(torch.inf), reduce="min")
        self.add_state("shown", reduce="cat")

    def update(self, values):
        self.lowest = torch.minimum(self.lowest, values.min())
        self.shown.append(values)

    def compute(self):
        return {"lowest": self.lowest, "shown": len(torch.cat(self.shown))}


def test_states_are_attributes_that_begin_at_their_defaults_and_return_to_them():
    metric = Range()
    metric.update(torch.tensor([3.0, 2.0]))
    metric.update(torch.tensor([5.0]))
    assert metric.compute() == {"lowest": 2.0, "shown": 3}
    copied = copy.deepcopy(metric)
    metric.reset()
    assert (metric.lowest, metric.shown) == (torch.inf, [])
    assert copied.compute() == {"lowest": 2.0, "shown": 3}


def test_a_default_is_not_changed_by_an_update_in_place():
    class Sum(Range):
        def __init__(self):
            self.add_state("total", torch.zeros(1), reduce="sum")

    metric = Sum()
    metric.total += 3
    metric.reset()
    assert metric.total.tolist() == [0]


def test_states_move_to_a_device():
    metric = Range()
    metric.update(torch.ones(2))
    metric.to(torch.device("meta"))
    assert (metric.lowest.device.type, metric.shown[0].device.type) == ("meta", "meta")
    metric.reset()
    assert metric.lowest.device.type == "meta"


@pytest.mark.parametrize(
    ("name", "default", "reduce", "problem"),
    [
        ("x", torch.zeros(1), "mean", "reduce='mean': expected sum, min, max, cat"),
        ("x", torch.zeros(1), "cat", "the state 'x' with reduce='cat' needs no default: the state is a list"),
        ("x", None, "sum", "the state 'x' with reduce='sum' needs a tensor as default"),
        ("compute", torch.zeros(1), "sum", "Range has an attribute 'compute' already"),
        ("lowest", torch.zeros(1), "sum", "Range has an attribute 'lowest' already"),
    ],
)
def test_a_state_that_cannot_be_reduced_is_refused(name, default, reduce, problem):
    with pytest.raises(ValueError, match=problem):
        Range().add_state(name, default, reduce=reduce)

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpctrain.errors import TaskError
from hpctrain.tasks.evaluation_contract import checked_sums, checked_values
from hpctrain.tasks.task import Task


class Mine(Task):
    def train_dataset(self):
        raise NotImplementedError

    def loss(self, model, batch):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ((torch.tensor(3.0), 4), (3.0, 4)),
        ((1.5, torch.tensor(4)), (1.5, 4)),
        ([torch.tensor([2]), torch.tensor([[5]])], (2, 5)),
        ((np.float32(0.5), np.int64(2)), (0.5, 2)),
        ((torch.tensor(True), True), (1, 1)),
        ((2.0**24 + 1, 1), (16777217, 1)),
    ],
)
def test_single_numbers_of_any_kind_are_sums_and_counts(pair, expected):
    ((total, count),) = checked_sums(Mine(), {"loss": pair}).values()
    assert total.ndim == 0
    assert (float(total), float(count)) == expected


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (None, "it returned None: check its return statement"),
        (torch.tensor(1.0), r"it returned a tensor of shape \[\]"),
        ({"loss": torch.tensor(1.0)}, r"its 'loss' is a tensor of shape \[\]"),
        ({"loss": 1.0}, "its 'loss' is a float"),
        ({"loss": (1.0,)}, "its 'loss' is a tuple of 1"),
        ({"loss": (1.0, 2, 3)}, "its 'loss' is a tuple of 3"),
        ({"loss": (torch.ones(3), 3)}, r"the sum of its 'loss' is a tensor of shape \[3\]"),
        ({"loss": (1.0, None)}, "the count of its 'loss' is None"),
        ({"loss": (1.0, torch.ones(2))}, r"the count of its 'loss' is a tensor of shape \[2\]"),
        ({"loss": ("much", 1)}, "the sum of its 'loss' is a str"),
        ({3: (1.0, 1)}, "it has the key 3"),
    ],
)
def test_anything_else_is_an_error_that_says_what_to_return(returned, problem):
    with pytest.raises(TaskError, match=f"Mine.evaluate must return a dict of pairs by metric.*, but {problem}"):
        checked_sums(Mine(), returned)


def test_derived_values_are_numbers():
    assert checked_values(Mine(), {"a": torch.tensor([2.0]), "b": 3}) == {"a": 2.0, "b": 3.0}
    for returned, problem in (
        (None, "it returned None"),
        ({"a": torch.ones(2)}, r"its 'a' is a tensor of shape \[2\]"),
        ({1: 1.0}, "it has the key 1"),
    ):
        with pytest.raises(TaskError, match=f"Mine.derive must return a dict of numbers by metric, but {problem}"):
            checked_values(Mine(), returned)

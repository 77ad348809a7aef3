from __future__ import annotations

import numpy as np
import pytest
import torch

from hpctrain.errors import TaskError
from hpctrain.tasks import Metric, PerSample
from hpctrain.tasks.contract import (
    checked_computed,
    checked_metrics,
    checked_results,
    checked_scores,
    checked_values,
)
from hpctrain.tasks.task import Task


class Mine(Task):
    def train_dataset(self):
        raise NotImplementedError

    def loss(self, model, batch):
        raise NotImplementedError


class Errors(Metric):
    def update(self):
        raise NotImplementedError

    def compute(self):
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
    ((total, count),) = checked_results(Mine(), {"loss": pair}, 4).sums.values()
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
        checked_results(Mine(), returned, 4)


def test_derived_values_are_numbers():
    assert checked_values(Mine(), {"a": torch.tensor([2.0]), "b": 3}) == {"a": 2.0, "b": 3.0}
    for returned, problem in (
        (None, "it returned None"),
        ({"a": torch.ones(2)}, r"its 'a' is a tensor of shape \[2\]"),
        ({1: 1.0}, "it has the key 1"),
    ):
        with pytest.raises(TaskError, match=f"Mine.derive must return a dict of numbers by metric, but {problem}"):
            checked_values(Mine(), returned)


def test_values_per_sample_stand_beside_sums():
    boxes = [torch.ones(2, 4), torch.ones(0, 4)]
    returned = {"loss": (1.0, 2), "score": PerSample(torch.ones(2, 3)), "boxes": PerSample(boxes)}
    returned["labels"] = PerSample([torch.tensor(1), torch.tensor(2)])
    found = checked_results(Mine(), returned, 2)
    assert list(found.sums) == ["loss"]
    assert found.per_sample["score"].shape == (2, 3)
    assert found.per_sample["boxes"] == boxes
    assert found.per_sample["labels"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (torch.ones(3), r"'x' needs one entry for each of the 2 samples of the batch, but is a tensor of shape \[3\]"),
        (
            torch.tensor(1.0),
            r"'x' needs one entry for each of the 2 samples of the batch, but is a tensor of shape \[\]",
        ),
        ([torch.ones(1)], "'x' needs a tensor for each of the 2 samples, but has 1"),
        ([1.0, 2.0], "'x' needs a tensor, or a list of tensors, but is a list of 2"),
        (np.ones(2), "'x' needs a tensor, or a list of tensors, but is a ndarray"),
    ],
)
def test_other_values_per_sample_are_refused(values, problem):
    with pytest.raises(TaskError, match=f"^Mine.evaluate: PerSample {problem}$"):
        checked_results(Mine(), {"x": PerSample(values)}, 2)


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (None, "must return a dict of torchmetrics' .*Metric, but it returned None: check its return statement"),
        ({1: Errors()}, "but it has the key 1"),
        ({"x": Errors}, "but its 'x' is the class Errors: call it"),
        ({"x": torch.nn.Linear(1, 1)}, "but its 'x' is a Linear"),
        (dict.fromkeys("xy", Errors()), "each with one name, but one object has several"),
    ],
)
def test_metrics_are_objects_by_name(returned, problem, monkeypatch):
    monkeypatch.setattr(Mine, "build_metrics", lambda task: returned)
    with pytest.raises(TaskError, match=rf"^Mine\.build_metrics .*{problem}$"):
        checked_metrics(Mine())


def test_an_attribute_in_the_place_of_the_method_is_named(monkeypatch):
    monkeypatch.setattr(Mine, "build_metrics", {})
    with pytest.raises(
        TaskError, match=r"^Mine\.build_metrics must be a method that returns metrics .*: rename this dict$"
    ):
        checked_metrics(Mine())


def test_computed_values_may_be_vectors_and_dicts():
    computed = {"a": torch.tensor([1, 2]), "b": {"c": np.float32(0.5), 3: np.array([4.0])}, "d": [True, 2.5]}
    expected = {"m/a/0": 1, "m/a/1": 2, "m/b/c": 0.5, "m/b/3": 4, "m/d/0": 1, "m/d/1": 2.5}
    assert checked_computed(Mine(), "m", computed) == expected
    assert checked_scores(Mine(), {"m": computed}) == expected
    assert checked_computed(Mine(), "m", torch.tensor([[2.0]])) == {"m": 2}


@pytest.mark.parametrize("value", [torch.ones(2, 2), (torch.ones(2), torch.ones(3)), "much", torch.ones(2) * 1j])
def test_curves_and_texts_are_not_logged_as_numbers(value):
    expected = r"^the metric 'm' of Mine must be a number, a vector, or a dict of them, but 'm/x' is a .*: a curve or"
    with pytest.raises(TaskError, match=expected):
        checked_computed(Mine(), "m", {"x": value})
    with pytest.raises(TaskError, match=r"^Mine\.compute_metrics must be a number"):
        checked_scores(Mine(), {"m": value})
    with pytest.raises(TaskError, match=r"^Mine\.compute_metrics must return a dict of numbers by metric, but"):
        checked_scores(Mine(), None)

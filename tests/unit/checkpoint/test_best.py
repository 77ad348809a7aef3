from __future__ import annotations

import pytest

from hpctrain.checkpoint.best import Best
from hpctrain.config.checkpoint import Checkpoint
from hpctrain.errors import ConfigError
from hpctrain.run.evaluation import Score


def updated(best, values, first=1):
    return [best.update(step, {"eval/accuracy": value}) for step, value in enumerate(values, first)]


def test_a_new_best_asks_to_be_kept():
    assert updated(Best("accuracy", "max", 1), [0.1, 0.3, 0.3, 0.2, 0.4]) == [True, True, False, False, True]
    assert updated(Best("accuracy", "min", 2), [0.3, 0.2, 0.25, 0.4, 0.1]) == [True, True, True, False, True]
    assert updated(Best("accuracy", "max", 0), [0.1, 0.2]) == [False, False]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_never_among_the_best(value):
    best = Best("accuracy", "max", 3)
    assert updated(best, [value]) == [False]
    assert best.score_at(1) is None


def test_the_score_belongs_to_the_step_that_was_evaluated_last():
    best = Best("accuracy", "max", 0)
    updated(best, [0.5, 0.4])
    assert (best.score_at(1), best.score_at(2)) == (None, Score("accuracy", "max", 0.4))


@pytest.mark.parametrize("cut", range(6))
def test_a_resumed_run_keeps_the_best_of_a_straight_one(cut):
    values = [0.3, 0.1, 0.4, 0.1, 0.5, 0.45]
    straight = updated(Best("accuracy", "max", 2), values)
    first, second = Best("accuracy", "max", 2), Best("accuracy", "max", 2)
    before = updated(first, values[:cut])
    second.load_state(first.state())
    assert before + updated(second, values[cut:], first=cut + 1) == straight


def test_a_best_whose_checkpoint_is_gone_does_not_keep_the_next_from_being_saved(directory):
    for step in (1, 3):
        directory.checkpoint(step).mkdir(parents=True)
    first, second = Best("accuracy", "max", 1), Best("accuracy", "max", 1, directory=directory)
    updated(first, [0.5, 0.9, 0.8])
    second.load_state(first.state())
    assert updated(second, [0.7, 0.6], first=4) == [True, False]
    assert second.top.step == 2


def test_another_metric_begins_anew():
    best, other = Best("accuracy", "max", 1), Best("loss", "min", 1)
    updated(best, [0.9])
    other.load_state(best.state())
    assert other.update(2, {"eval/loss": 5.0})
    other.load_state({})
    assert other.update(3, {"eval/loss": 6.0})


def test_a_metric_that_is_not_evaluated_is_named_with_those_that_are():
    with pytest.raises(ConfigError, match=r"checkpoint\.metric=f1: the evaluation returns accuracy, loss"):
        Best("f1", "max", 1, required=True).update(1, {"eval/loss": 1.0, "eval/accuracy": 0.5})
    assert not Best("f1", "max", 1).update(1, {"eval/loss": 1.0})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ("accuracy", "max")),
        ({"metric": "loss"}, ("loss", "min")),
        ({"metric": "f1", "metric_mode": "max"}, ("f1", "max")),
        ({"metric_mode": "min"}, ("accuracy", "min")),
    ],
)
def test_the_tasks_metric_counts_unless_one_is_configured(keys, expected):
    assert Best.configured(Checkpoint(**keys), "accuracy", "max").state()["best"]["metric"] == expected


def test_it_is_not_defined_which_values_are_better():
    assert Best.configured(Checkpoint(metric="f1"), "accuracy", "max") is None
    with pytest.raises(ConfigError, match=r"checkpoint\.metric_mode.*which values of f1 are better"):
        Best.configured(Checkpoint(metric="f1", keep_best=1), "accuracy", "max")

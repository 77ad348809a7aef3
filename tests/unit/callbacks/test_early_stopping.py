from __future__ import annotations

import math

import pytest

from hpctrain.callbacks.early_stopping import EarlyStopping
from hpctrain.errors import ConfigError


def ends_at(callback, training, values, name="loss"):
    """The number of the evaluation at which the run ends, counted from 1; None if it doesn't."""
    callback.on_start(training)
    for number, value in enumerate(values, 1):
        callback.after_evaluation(training, {name: value})
        if training.reason:
            return number
    return None


@pytest.mark.parametrize(
    ("options", "values", "end"),
    [
        ({"patience": 2}, [3, 2, 2, 1, 1, 1], 6),
        ({"patience": 1}, [3, 2, 1, 1], 4),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.6, 2.5, 2.4], 3),
        ({"patience": 2}, [3, math.nan, 2, math.nan, math.nan], 5),
        ({"patience": 2}, [math.nan, math.nan], 2),
        ({"patience": 2}, [3, 2, 1], None),
        ({"patience": 1, "mode": "max"}, [1, 2, 1.5], 3),
    ],
)
def test_it_ends_the_run_when_the_metric_has_stopped_improving(training, options, values, end):
    assert ends_at(EarlyStopping(**options), training(), values) == end


def test_another_metric(training):
    watched = training()
    assert ends_at(EarlyStopping(1, metric="accuracy", mode="max"), watched, [0.5, 0.6, 0.4], "accuracy") == 3
    assert watched.reason == "accuracy hasn't improved in 1 evaluation, the best was 0.6"


@pytest.mark.parametrize("stop", range(1, 5))
def test_it_continues_as_if_it_hadnt_stopped(training, stop):
    values = [3, 2, 2.5, 2.1, 2.2, 2.3]
    first, second, watched = EarlyStopping(3), EarlyStopping(3), training()
    assert ends_at(first, watched, values[:stop]) is None
    second.load_state_dict(first.state_dict())
    assert ends_at(second, watched, values[stop:]) == 5 - stop


@pytest.mark.parametrize(
    ("options", "metric", "mode", "kept"),
    [
        ({}, "loss", "min", (3, 1)),
        ({"metric": "loss"}, "loss", "min", (3, 1)),
        ({}, "accuracy", "max", (None, 0)),
        ({}, "loss", "max", (None, 0)),
        ({"metric": "accuracy", "mode": "max"}, "loss", "min", (None, 0)),
        ({"mode": "max"}, "loss", "min", (None, 0)),
    ],
)
def test_the_values_of_another_metric_are_dropped(training, options, metric, mode, kept):
    first, second, watched = EarlyStopping(2), EarlyStopping(2, **options), training()
    ends_at(first, training(), [3, 4])
    second.load_state_dict(first.state_dict())
    watched.metric, watched.metric_mode = metric, mode
    second.on_start(watched)
    assert (second.best, second.num_bad) == kept


def test_a_state_without_a_mode_is_that_of_an_earlier_version(training):
    callback = EarlyStopping(2)
    callback.load_state_dict({"metric": "loss", "best": 3.0, "num_bad": 1})
    callback.on_start(training())
    assert (callback.best, callback.num_bad) == (3.0, 1)


def test_a_metric_that_isnt_there_or_has_no_mode_is_refused(training):
    with pytest.raises(ConfigError, match=r"callbacks\.my_stop\.mode.*which values of bleu are better"):
        EarlyStopping(metric="bleu").on_start(training())
    with pytest.raises(ConfigError, match=r"callbacks\.my_stop\.metric=loss: the evaluation returns accuracy"):
        ends_at(EarlyStopping(), training(), [1.0], "accuracy")


@pytest.mark.parametrize("options", [{"mode": "minimum"}, {"patience": 0}, {"patience": "2"}, {"min_delta": -1.0}])
def test_values_that_no_configuration_has_checked_are_refused(options):
    (name,) = options
    with pytest.raises(ConfigError, match=rf"^callbacks\.early_stopping\.{name}="):
        EarlyStopping(**options)

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest

from hpctrain.run.score import Score, best_steps, score_of


def test_a_score_comes_back_from_its_record():
    score = Score("accuracy", "max", 0.1 + 0.2)
    assert score_of(json.loads(json.dumps(asdict(score)))) == score


@pytest.mark.parametrize(
    "record",
    [None, 3, {}, {"name": "a", "mode": "up", "value": 1.0}, {"name": "a", "mode": "min", "value": math.nan}],
)
def test_a_record_that_is_not_a_score(record):
    assert score_of(record) is None


def test_less_or_more_is_better_and_of_equals_the_earlier():
    values = {10: 0.5, 20: 0.7, 30: 0.7, 40: 0.1}
    assert best_steps({step: Score("a", "max", value) for step, value in values.items()}, 3) == [20, 30, 10]
    assert best_steps({step: Score("a", "min", value) for step, value in values.items()}, 1) == [40]
    assert best_steps({10: None}, 2) == best_steps({}, 2) == []


def test_the_metric_of_the_newest_counts():
    scores = {1: Score("loss", "min", 0.1), 2: Score("accuracy", "max", 0.5), 3: None}
    assert best_steps(scores, 5) == [2]

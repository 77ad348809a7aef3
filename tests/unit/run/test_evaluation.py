from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest

from hpctrain.run.evaluation import EvaluationRecord, Score, best_steps, read_evaluation
from hpctrain.run.record_fields import decode


def test_the_newest_record_counts(directory):
    assert directory.newest(read_evaluation) is None
    for attempt in (1, 2, 3):
        directory.attempt(attempt).mkdir()
    EvaluationRecord(step=4, means={"eval/loss": 1.0}).write(directory.attempt(1))
    best = Score("accuracy", "max", 0.5)
    EvaluationRecord(step=8, means={"eval/loss": 2.0, "eval/f1": math.nan}, best=best, best_step=4).write(
        directory.attempt(2)
    )
    assert directory.newest(read_evaluation) == EvaluationRecord(
        step=8, means={"eval/loss": 2.0}, best=best, best_step=4
    )


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"step": "x", "means": {}}', '{"step": 1}', '{"step": 1, "means": 3}', '{"step": 1, "means": null}'],
)
def test_a_damaged_record_counts_as_absent(directory, text):
    directory.attempt(1).mkdir()
    (directory.attempt(1) / "evaluation.json").write_text(text)
    assert directory.newest(read_evaluation) is None


@pytest.mark.parametrize(
    ("best", "best_step"),
    [
        (None, 4),
        ({"name": "loss", "mode": "up", "value": 1.5}, 4),
        ({"name": "loss", "mode": "min", "value": 1.5}, None),
        ({"name": "loss", "mode": "min", "value": 1.5}, "x"),
    ],
)
def test_the_best_score_and_its_step_count_together(directory, best, best_step):
    directory.attempt(1).mkdir()
    record = {"step": 8, "means": {"eval/loss": 2.0}, "best": best, "best_step": best_step}
    (directory.attempt(1) / "evaluation.json").write_text(json.dumps(record))
    assert directory.newest(read_evaluation) == EvaluationRecord(step=8, means={"eval/loss": 2.0})


def test_a_record_of_a_directory_that_is_gone_is_not_an_error(directory):
    EvaluationRecord(step=4, means={}).write(directory.attempt(9))


def test_a_score_comes_back_from_its_record():
    score = Score("accuracy", "max", 0.1 + 0.2)
    assert decode(Score, json.loads(json.dumps(asdict(score)))) == score


@pytest.mark.parametrize(
    "record",
    [None, 3, {}, {"name": "a", "mode": "up", "value": 1.0}, {"name": "a", "mode": "min", "value": math.nan}],
)
def test_a_record_that_is_not_a_score(record):
    assert decode(Score, record) is None


def test_less_or_more_is_better_and_of_equals_the_earlier():
    values = {10: 0.5, 20: 0.7, 30: 0.7, 40: 0.1}
    assert best_steps({step: Score("a", "max", value) for step, value in values.items()}, 3) == [20, 30, 10]
    assert best_steps({step: Score("a", "min", value) for step, value in values.items()}, 1) == [40]
    assert best_steps({10: None}, 2) == best_steps({}, 2) == []


def test_the_metric_of_the_newest_counts():
    scores = {1: Score("loss", "min", 0.1), 2: Score("accuracy", "max", 0.5), 3: None}
    assert best_steps(scores, 5) == [2]

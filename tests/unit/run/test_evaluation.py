import math

import pytest

from hpctrain.run.evaluation import EvaluationRecord, last_evaluation
from hpctrain.run.score import Score


def test_the_newest_record_counts(directory):
    assert last_evaluation(directory) is None
    for attempt in (1, 2, 3):
        directory.claim(attempt).mkdir()
    EvaluationRecord(step=4, means={"eval/loss": 1.0}).write(directory.claim(1))
    best = Score("accuracy", "max", 0.5)
    EvaluationRecord(step=8, means={"eval/loss": 2.0, "eval/f1": math.nan}, best=best, best_step=4).write(
        directory.claim(2)
    )
    assert last_evaluation(directory) == EvaluationRecord(step=8, means={"eval/loss": 2.0}, best=best, best_step=4)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"step": "x", "means": {}}', '{"step": 1, "means": 3}', '{"step": 1, "means": null}']
)
def test_a_damaged_record_counts_as_absent(directory, text):
    directory.claim(1).mkdir()
    (directory.claim(1) / "evaluation.json").write_text(text)
    assert last_evaluation(directory) is None


def test_a_record_of_a_directory_that_is_gone_is_not_an_error(directory):
    EvaluationRecord(step=4).write(directory.claim(9))

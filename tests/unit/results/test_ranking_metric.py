from __future__ import annotations

import pytest

from hpctrain.errors import ConfigError, RunDirectoryError
from hpctrain.results.ranking_metric import RankingMetric, judging_metric, named_metric
from hpctrain.results.run_result import read_results
from hpctrain.run.evaluation import EvaluationRecord, Score
from hpctrain.status.runs import find_runs

DIGITS = {"task": {"_target_": "hpctrain.tasks.digits.Digits"}}


def read(tmp_path):
    return read_results(find_runs(tmp_path / "sweep"))


def test_a_mixture_of_metrics_is_one_line(tmp_path, make_run):
    make_run(0, {}, {10: 0.5})
    make_run(1, {}, {10: 0.5})
    other = make_run(2, {}, {10: 0.5})
    EvaluationRecord(step=10, best=Score("loss", "min", 1.0), best_step=10).write(other.attempt(1))
    with pytest.raises(RunDirectoryError) as error:
        judging_metric(read(tmp_path))
    assert str(error.value) == (
        "the runs are judged by different metrics: eval/accuracy (max, 2 runs), eval/loss (min, 1 run); name the one "
        "to compare, such as --metric accuracy, or name runs with the same metric"
    )


@pytest.mark.parametrize("configured", [{}, {"metric": "loss", "metric_mode": None}])
def test_old_runs_have_their_metric_in_the_configuration_alone(tmp_path, make_run, configured):
    run = make_run(0, {**DIGITS, "checkpoint": configured}, {10: 0.5})
    (run.attempt(1) / "evaluation.json").unlink()
    expected = RankingMetric("eval/loss", "min") if configured else RankingMetric("eval/accuracy", "max")
    assert judging_metric(read(tmp_path)) == expected


def test_nothing_evaluated(tmp_path, make_run):
    make_run(0, DIGITS)
    with pytest.raises(RunDirectoryError, match=r"no run has been evaluated .* none has logged anything yet; `python"):
        judging_metric(read(tmp_path))
    run = make_run(1, DIGITS, {})
    run.metrics.write_text('{"step": 3, "train/loss": 1.5, "train/lr": 0.1}\n')
    with pytest.raises(RunDirectoryError, match=r"name one that was logged with --metric NAME .*: train/loss$"):
        judging_metric(read(tmp_path))


@pytest.mark.parametrize("task", [{}, {"task": None}, {"task": {}}])
def test_a_stored_configuration_without_a_task_names_no_metric(tmp_path, make_run, task):
    run = make_run(0, {**task, "checkpoint": {"metric": None}}, {10: 0.5})
    (run.attempt(1) / "evaluation.json").unlink()
    with pytest.raises(RunDirectoryError, match="no run has been evaluated by a metric that ranks it"):
        judging_metric(read(tmp_path))


def test_a_program_has_no_metric_of_its_own(tmp_path, make_run):
    run = make_run(0, {"run": {"command": ["python", "train.py"]}}, {})
    run.metrics.write_text('{"step": 3, "error": 1.5}\n')
    with pytest.raises(RunDirectoryError, match=r"a program's run has no metric of its own .*: error$"):
        judging_metric(read(tmp_path))
    assert named_metric(read(tmp_path), "error", "max") == RankingMetric("error", "max")


def test_named_metrics(tmp_path, make_run):
    make_run(0, {"checkpoint": {"metric": "f1", "metric_mode": "max"}}, {10: 0.5})
    results = read(tmp_path)
    assert named_metric(results, "accuracy", None) == RankingMetric("eval/accuracy", "max")
    assert named_metric(results, "eval/accuracy", "min") == RankingMetric("eval/accuracy", "min")
    assert named_metric(results, "train/loss", None) == RankingMetric("train/loss", "min")
    with pytest.raises(
        ConfigError, match=r"--metric=accuraci: no run logged it; did you mean accuracy\? logged: eval/"
    ):
        named_metric(results, "accuraci", None)


def test_a_mode_is_required_where_nothing_says_it(tmp_path, make_run):
    run = make_run(0, {"checkpoint": {"metric": "f1", "metric_mode": "max"}}, {})
    # far from the end of the file
    lines = ['{"step": 1, "train/grad_norm": 2, "eval/f1": 1}', *('{"step": 2, "train/loss": 1}' for _ in range(4000))]
    run.metrics.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match=r"--metric=train/grad_norm: nothing .*; add --mode min or --mode max"):
        named_metric(read(tmp_path), "train/grad_norm", None)
    assert named_metric(read(tmp_path), "f1", None) == RankingMetric("eval/f1", "max")

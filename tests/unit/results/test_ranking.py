from __future__ import annotations

import json
import math
import os
import socket

import pytest

from hpctrain.errors import ConfigError, RunDirectoryError
from hpctrain.results.ranking import RankingMetric, judging_metric, named_metric, rank
from hpctrain.results.run_result import read_results
from hpctrain.run.evaluation import EvaluationRecord, Score
from hpctrain.run.reason import Reason
from hpctrain.status.runs import find_runs

ACCURACY = RankingMetric("eval/accuracy", "max")


def read(tmp_path):
    return read_results(find_runs(tmp_path / "sweep"))


def ranked(tmp_path, metric=ACCURACY):
    return rank(read(tmp_path), metric)


def lr(value, seed=0):
    return {"seed": seed, "optimizer": {"lr": value}}


def test_the_best_run_comes_first_with_what_it_varies(tmp_path, make_run):
    make_run(0, lr(0.1), {5: 0.5, 10: 0.25})
    make_run(1, lr(0.01), {5: 0.5, 10: 0.75})
    found = ranked(tmp_path)
    assert found.keys == ("optimizer.lr",)
    one, other = found.rows
    assert found.winner is one
    assert (one.rank, one.label, one.values) == (1, "optimizer.lr=0.01", {"optimizer.lr": 0.01})
    assert (one.best, one.best_step, one.last, one.step, one.seconds) == (0.75, 10, 0.75, 10, 4.0)
    assert (one.state, [run.directory.path.name for run in one.runs]) == ("completed", ["1"])
    assert (other.rank, other.best, other.best_step, other.last) == (2, 0.5, 5, 0.25)


def test_runs_that_differ_in_nothing_but_the_seed_are_one_row(tmp_path, make_run):
    for number, (value, seed, accuracy) in enumerate(
        [(0.1, 0, 0.5), (0.1, 1, 0.7), (0.1, 2, 0.6), (0.01, 0, 0.65), (0.001, 0, 0.9)]
    ):
        reason = Reason.FAILED if value == 0.001 else Reason.COMPLETED
        make_run(number, lr(value, seed), {10: accuracy}, reason=reason)
    found = ranked(tmp_path)
    assert found.keys == ("optimizer.lr", "seed")
    single, row, failed = found.rows
    assert (single.label, single.seeds, single.spread.deviation) == ("optimizer.lr=0.01 seed=0", (0,), None)
    assert (row.label, row.seeds, row.values) == ("optimizer.lr=0.1", (0, 1, 2), {"optimizer.lr": 0.1})
    assert row.best == pytest.approx(0.6)
    assert row.spread.deviation == pytest.approx(0.1)
    assert (row.spread.lowest, row.spread.highest, row.best_step) == (0.5, 0.7, None)
    assert (failed.rank, failed.state, failed.best) == (None, "failed", 0.9)


def test_values_that_are_no_numbers_are_never_best(tmp_path, make_run):
    make_run(0, lr(0.1), {5: 0.5, 10: math.nan})
    make_run(1, lr(0.2), {5: math.inf, 10: math.nan})
    first, second = ranked(tmp_path).rows
    assert (first.best, first.best_step) == (0.5, 5)
    assert math.isnan(first.last)
    assert (second.rank, second.best) == (None, None)
    named = named_metric(read_results(find_runs(tmp_path)), "loss", None)
    assert named == RankingMetric("eval/loss", "min")
    first, second = ranked(tmp_path, named).rows
    assert (first.best, first.best_step, second.best) == (1.5, 5, None)


def test_a_live_run_counts_with_what_it_has(tmp_path, make_run):
    make_run(0, lr(0.1), {10: 0.5})
    live = make_run(1, lr(0.2), {5: 0.75}, reason=None)
    owner = {"host": socket.gethostname(), "pid": os.getpid()}
    (live.attempt(1) / "owner.json").write_text(json.dumps(owner))
    make_run(2, lr(0.3), {5: 0.9}, reason=Reason.INTERRUPTED)
    make_run(3, lr(0.4))
    found = ranked(tmp_path).rows
    assert [(row.rank, row.state, row.runs[0].is_live) for row in found] == [
        (1, "running", True),
        (2, "completed", False),
        (None, "interrupted", False),
        (None, "prepared", False),
    ]


def test_damaged_and_old_runs(tmp_path, make_run):
    make_run(0, lr(0.1), {10: 0.5})
    torn = make_run(1, lr(0.2), {10: 0.75})
    (torn.attempt(1) / "evaluation.json").write_text('{"step": 1')
    torn.metrics.write_text(torn.metrics.read_text() + '{"step": 11, "eval/acc')
    unread = make_run(2, lr(0.3), {10: 0.6})
    unread.config.write_text("optimizer: [")
    empty = make_run(3, lr(0.4), {10: 0.9})
    empty.attempts.write_text('{"attempt": 1, "event": "start", "time": "x"}\n')
    found = ranked(tmp_path)
    assert found.keys == ("optimizer.lr",)
    assert [(row.label, row.best, row.state) for row in found.rows] == [
        ("optimizer.lr=0.2", 0.75, "completed"),
        ("2", 0.6, "completed"),
        ("optimizer.lr=0.1", 0.5, "completed"),
        ("optimizer.lr=0.4", 0.9, "unreadable"),
    ]


def test_without_a_metric_nothing_has_a_rank(tmp_path, make_run):
    make_run(0, lr(0.1), {10: 0.5})
    make_run(1, lr(0.2), {})
    found = ranked(tmp_path, None)
    assert found.winner is None
    assert [(row.rank, row.best) for row in found.rows] == [(None, None), (None, None)]
    assert judging_metric(read_results(find_runs(tmp_path))) == ACCURACY


DIGITS = {"task": {"_target_": "hpctrain.tasks.digits.Digits"}}


def test_a_mixture_of_metrics_is_one_line(tmp_path, make_run):
    make_run(0, {}, {10: 0.5})
    make_run(1, {}, {10: 0.5})
    other = make_run(2, {}, {10: 0.5})
    EvaluationRecord(step=10, means={}, best=Score("loss", "min", 1.0), best_step=10).write(other.attempt(1))
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

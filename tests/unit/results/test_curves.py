from __future__ import annotations

import json
import math

import pytest

from hpctrain.results.curves import Curve, read_curves
from hpctrain.run.ledger import Attempt


def lines(*records, torn=""):
    return "".join(json.dumps(record) + "\n" for record in records) + torn


def test_each_metric_is_a_curve(directory):
    directory.metrics.write_text(
        lines(
            {"step": 10, "time": 1.5, "train/loss": 2, "train/lr": 0.1},
            {"step": 12, "time": 2.0, "eval/loss": 1.5},
            {"step": 20, "time": 2.5, "train/loss": 1.0, "ok": True, "text": "no", "deep": {}},
        )
    )
    curves = read_curves(directory.metrics)
    assert list(curves) == ["train/loss", "train/lr", "eval/loss"]
    assert curves["train/loss"] == Curve("train/loss", [10, 20], [1.5, 2.5], [2.0, 1.0])


def test_values_that_are_not_finite_are_read(directory):
    record = {"step": 1, "time": 1, "a": None, "b": None, "c": 1, "nonfinite": {"a": "nan", "b": "-inf", "d": "no"}}
    directory.metrics.write_text(lines(record))
    curves = read_curves(directory.metrics)
    assert math.isnan(curves["a"].values[0])
    assert curves["b"].values == [-math.inf]
    assert "d" not in curves


def test_torn_lines_are_skipped(directory):
    whole = {"step": 1, "time": 1.0, "a": 1.0}
    directory.metrics.write_text(
        '{"step": 0, "a"\n' + lines(whole) + '{"step": "x", "a": 3}\n[1]\n' + '{"step": 2, "a": 5'
    )
    assert read_curves(directory.metrics)["a"].values == [1.0]


def test_two_torn_lines_are_not_joined_to_a_record(directory):
    directory.metrics.write_text('{"step": 1, "a": "}\n{", "b": 3}\n')
    assert read_curves(directory.metrics) == {}


def test_no_file_has_no_curves(directory):
    assert read_curves(directory.metrics) == {}


def test_a_resume_voids_later_records(directory):
    records = [{"step": step, "time": float(step), "a": 0.0} for step in range(1, 11)]
    resumed = [{"step": step, "time": 20.0 + step, "a": 1.0} for step in range(6, 9)]
    attempts = [Attempt(attempt=1, start_step=0, start_time=0.5), Attempt(attempt=2, start_step=4, start_time=20.0)]
    directory.metrics.write_text(lines(*records, *resumed))
    curve = read_curves(directory.metrics, attempts=attempts)["a"]
    assert curve.steps == [1, 2, 3, 4, 6, 7, 8]
    assert curve.values == [0.0] * 4 + [1.0] * 3


def test_a_curve_never_doubles_back(directory):
    records = [{"step": step, "time": 1.0, "a": float(place)} for place, step in enumerate([1, 2, 3, 2, 3, 3])]
    directory.metrics.write_text(lines(*records))
    curve = read_curves(directory.metrics)["a"]
    assert (curve.steps, curve.values) == ([1, 2, 3], [0.0, 3.0, 5.0])


def test_only_lines_with_a_text_are_parsed(directory):
    directory.metrics.write_text(lines({"step": 1, "a": 1}, {"step": 1, "eval/b": 2, "c": 3}))
    assert set(read_curves(directory.metrics, containing='"eval/b"')) == {"eval/b", "c"}


@pytest.mark.parametrize("count", [1, 5, 99, 100, 101, 5000])
def test_a_thinned_curve_keeps_its_extremes(count):
    values = [math.sin(place) for place in range(count)]
    values[count // 3] = 50.0
    curve = Curve("a", list(range(count)), [0.0] * count, values)
    thin = curve.thinned(100)
    assert len(thin.steps) == len(thin.times) == len(thin.values) <= 102
    assert thin.steps == sorted(set(thin.steps))
    assert (min(thin.values), max(thin.values)) == (min(values), max(values))
    assert (thin.steps[0], thin.steps[-1]) == (0, count - 1)


def test_a_thinned_curve_keeps_what_is_not_finite():
    values = [math.inf if place == 700 else math.nan if place > 900 else float(place) for place in range(1000)]
    thin = Curve("a", list(range(1000)), [0.0] * 1000, values).thinned(20)
    assert 700 in thin.steps
    assert math.isnan(thin.values[-1])
    assert 900.0 in thin.values

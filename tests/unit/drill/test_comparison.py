from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.drill.comparison import TrainingResult, compare, read_result
from hpctrain.metrics.sink import JsonLinesSink
from hpctrain.run.checkpoints import CheckpointInfo
from hpctrain.run.directory import RunDirectory

NEWEST = CheckpointInfo(
    step=3, path=Path("x"), intact=True, problem="", bytes=9, samples_seen=24, weights_digest="ab" * 32
)


def result(**changes):
    found = {
        "newest": NEWEST,
        "metrics": {"train/loss": {1: 0.5, 2: 0.25, 3: 0.125}},
        "samples": {1: {0: (5, 4), 1: (3,)}, 2: {0: (1,)}},
    }
    return TrainingResult(**{**found, **changes})


def differing(one, other):
    return {row.what: row.difference for row in compare(one, other) if not row.equal}


def test_the_same_result():
    rows = compare(result(), result())
    assert [row.what for row in rows] == [
        *("steps", "samples seen", "weights digest", "train/loss", "samples by rank"),
    ]
    assert all(row.equal and not row.difference for row in rows)
    assert rows[3].straight == "0.125, 3 values"


@pytest.mark.parametrize(
    ("changes", "what", "difference"),
    [
        ({"newest": replace(NEWEST, step=4)}, "steps", ""),
        ({"newest": replace(NEWEST, weights_digest="cd" * 32)}, "weights digest", ""),
        (
            {"metrics": {"train/loss": {1: 0.5, 2: math.nextafter(0.25, 1), 3: 0.125}}},
            "train/loss",
            "first after step 2: 0.25 and 0.25000000000000006",
        ),
        ({"metrics": {"train/loss": {1: 0.5, 3: 0.125}}}, "train/loss", "first after step 2: 0.25 and nothing"),
        ({"metrics": {}}, "train/loss", "first after step 1: 0.5 and nothing"),
        ({"samples": {1: {0: (4, 5), 1: (3,)}, 2: {0: (1,)}}}, "samples by rank", "first in step 1"),
        ({"samples": {}}, "samples by rank", "first in step 1"),
    ],
)
def test_one_difference(changes, what, difference):
    assert differing(result(), result(**changes)) == {what: difference}


def test_what_neither_run_left_proves_nothing():
    empty = result(newest=None, metrics={}, samples={})
    assert list(differing(empty, empty)) == ["steps", "samples seen", "weights digest"]


def test_not_a_number_is_the_same_as_itself(tmp_path):
    directory = RunDirectory.at(tmp_path)
    directory.create(0o750)
    sink = JsonLinesSink(directory.metrics, 0)
    sink.log(1, {"train/loss": math.nan, "throughput/samples_per_s": 5.0})
    sink.log(1, {"eval/loss": math.inf})
    sink.close()
    for rank, samples in ((0, [7, 8]), (11, [9])):
        lines = [{"step": 1, "samples": [0]}, {"step": 1, "samples": samples}]
        directory.sample_log(rank).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_result(directory)
    assert str(found.metrics) == "{'train/loss': {1: nan}, 'eval/loss': {1: inf}}"
    assert found.samples == {1: {0: (7, 8), 11: (9,)}}
    assert found.newest is None
    assert set(differing(found, found)) == {"steps", "samples seen", "weights digest"}

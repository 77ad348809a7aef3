"""What is compared of two runs."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpctrain.drill.comparison import (
    TrainingResult,
    compare,
    compare_last_saves,
    read_result,
    result_of,
)
from hpctrain.metrics.sink import JsonLinesSink
from hpctrain.run.checkpoints import CheckpointInfo
from hpctrain.run.directory import RunDirectory
from hpctrain.run.saves import record_save

NEWEST = CheckpointInfo(step=3, path=Path("x"), intact=True, problem="", samples_seen=24, weights_digest="ab" * 32)


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


@pytest.fixture
def runs(tmp_path):
    found = [RunDirectory.at(tmp_path / name) for name in ("straight", "interrupted")]
    for run in found:
        run.create(0o750)
    return found


def write(run, name, seconds=0):
    path = run.checkpoints / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x")
    for changed in (path, path.parent):
        os.utime(changed, (seconds, seconds))
    return path


def save(run, name, value, seconds=0):
    path = write(run, name)
    torch.save({"w": torch.tensor([value])}, path)
    for changed in (path, path.parent):
        os.utime(changed, (seconds, seconds))
    return path


def test_reported_saves_are_compared(runs):
    for run, step in zip(runs, (5, 6), strict=True):
        record_save(run, 1, 3, write(run, "first.pt"))
        record_save(run, 1, step, save(run, f"{step}.pt", 1.0))
        write(run, "later.pt", seconds=9)
    saves, tensors = compare_last_saves(*runs, []).rows
    assert (saves.straight, saves.interrupted, saves.difference) == ("5.pt", "6.pt", "after steps 5 and 6")
    assert tensors.equal


def test_without_reports_what_was_written_last_is_compared_by_its_name(runs):
    for run in runs:
        save(run, "checkpoint-2/model.pt", 1.0, seconds=200)
        save(run, "checkpoint-1/model.pt", 2.0, seconds=100)
        write(run, "args.json", seconds=300)
        (run.checkpoints / "latest").symlink_to("checkpoint-1")
    save(runs[1], "checkpoint-9/model.pt", 3.0, seconds=900)
    saves, tensors = compare_last_saves(*runs, []).rows
    assert (saves.straight, saves.interrupted, saves.equal, tensors.equal) == ("checkpoint-2",) * 2 + (True, True)
    save(runs[0], "checkpoint-3/model.pt", 1.0, seconds=300)
    (row,) = compare_last_saves(*runs, []).rows
    assert (row.straight, row.interrupted) == ("checkpoint-3", "-")


def test_nothing_saved_proves_nothing(runs):
    assert "neither run saved" in compare_last_saves(*runs, []).unproven


def test_a_save_that_one_run_lacks_is_a_difference(runs):
    record_save(runs[0], 1, 3, write(runs[0], "a.pt"))
    (row,) = compare_last_saves(*runs, []).rows
    assert (row.what, row.straight, row.interrupted, row.equal) == ("save", "a.pt", "-", False)


def test_a_save_that_both_runs_wrote_proves_nothing(runs, tmp_path):
    (tmp_path / "a.pt").touch()
    (tmp_path / "b.pt").symlink_to("a.pt")
    for run, name in zip(runs, ("a.pt", "b.pt"), strict=True):
        record_save(run, 1, 1, tmp_path / name)
    assert compare_last_saves(*runs, []).unproven.startswith("both runs saved to ")


COMPARED = {"tensors": [2, 2], "equal": 1, "identical": [], "unreadable": {}, "left_out": [], "numbers": []}
NEAR = {"name": "model.w", "problem": "", "dtype": "float32", "shape": [2], "absolute": 0.5, "relative": 0.25}
OTHER = NEAR | {"name": "rng.cpu", "problem": "uint8 (4,) and uint8 (8,)", "absolute": None, "relative": None}


def compared(found, ignored=(), steps=(7, 7)):
    return result_of((Path("a.pt"), Path("b.pt")), steps, COMPARED | found, ignored)


def test_the_worst_tensor_is_named():
    shown = compared({"differing": [NEAR | {"name": "model.v", "relative": 0.1}, NEAR]})
    save, tensors = shown.rows
    assert save.equal
    assert (tensors.straight, tensors.equal, tensors.relative) == ("2", False, 0.25)
    assert tensors.difference == "2 of them, most of all model.w by 0.5"


def test_a_tensor_that_cannot_be_compared_is_within_no_tolerance():
    tensors = compared({"differing": [NEAR, OTHER]}).rows[1]
    assert tensors.difference == "2 of them, such as rng.cpu: uint8 (4,) and uint8 (8,)"
    assert not tensors.is_within(1.0)


def test_tensors_can_be_ignored():
    shown = compared({"differing": [OTHER]}, ignored=["rng.*"])
    assert all(row.equal for row in shown.rows)
    assert shown.notes == ("1 tensor differs, and matches --ignore",)


def test_saves_of_other_steps_and_unreadable_files_are_differences():
    shown = compared({"differing": [], "unreadable": {"x.pt": "EOFError: "}}, steps=(7, 8))
    assert [(row.what, row.difference) for row in shown.rows if not row.equal] == [
        ("save", "after steps 7 and 8"),
        ("x.pt", "can't be read: EOFError: "),
    ]


def test_a_save_without_tensors_proves_nothing():
    found = {"tensors": [0, 0], "differing": [], "left_out": ["state.json"]}
    shown = compared(found)
    assert shown.unproven == "there are no tensors in the save a.pt"
    assert shown.notes == ("without tensors, so not compared: state.json",)
    assert compared(found | {"identical": ["odd.pt"]}).unproven == ""


def test_differing_numbers_of_a_list_are_named_once():
    names = ["rng.pkl:state.1.0", "rng.pkl:state.1.1", "a.pt:time"]
    shown = compared({"differing": [], "numbers": names})
    assert shown.notes == ("numbers outside of tensors differ: a.pt:time, rng.pkl:state (2 numbers)",)
    assert all(row.equal for row in shown.rows)

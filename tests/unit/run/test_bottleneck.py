from __future__ import annotations

import json

import pytest

from hpctrain.run.bottleneck import PARTS, Bottleneck, read_bottleneck
from hpctrain.run.directory import RunDirectory

FOUND = Bottleneck(
    text="saving 22% of the time: checkpoint.every_steps 10 -> 60",
    also=("memory grows",),
    step=40,
    steps_timed=7,
    shares=dict.fromkeys(PARTS, 0.125),
    slowest_rank=1,
    slowest_host="n2",
    slowest_ratio=1.5,
    samples_per_s_per_device=100.0,
    flops_per_sample=1e9,
    memory_peak_bytes=2**30,
)


def test_it_is_read_as_it_was_written(tmp_path):
    FOUND.write(tmp_path)
    assert read_bottleneck(tmp_path) == FOUND


def test_the_newest_attempt_that_left_one_counts(tmp_path):
    directory = RunDirectory.at(tmp_path)
    assert directory.newest(read_bottleneck) is None
    for attempt in (1, 2, 10):
        directory.attempt(attempt).mkdir(parents=True)
    assert directory.newest(read_bottleneck) is None
    Bottleneck(text="old").write(directory.attempt(1))
    FOUND.write(directory.attempt(2))
    assert directory.newest(read_bottleneck) == FOUND


@pytest.mark.parametrize("text", ["", "[1]", "{}"])
def test_what_can_not_be_read_is_none(tmp_path, text):
    (tmp_path / "verdict.json").write_text(text)
    assert read_bottleneck(tmp_path) is None


def test_one_of_another_version_is_read_as_far_as_it_goes(tmp_path):
    record = {"text": "fine", "shares": {"data": 0.5}, "also": None, "new": 1}
    (tmp_path / "verdict.json").write_text(json.dumps(record))
    assert read_bottleneck(tmp_path) == Bottleneck(text="fine", shares={"data": 0.5})


def test_a_file_system_that_refuses_is_no_reason_to_stop(tmp_path):
    FOUND.write(tmp_path / "gone")

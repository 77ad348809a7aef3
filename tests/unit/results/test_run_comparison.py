from __future__ import annotations

import pytest

from hpctrain.metrics.sink import JsonLinesSink
from hpctrain.results.run_comparison import find_first_difference
from hpctrain.run.directory import RunDirectory


@pytest.fixture
def logged_run(tmp_path):
    def make(name, losses):
        directory = RunDirectory.at(tmp_path / name)
        directory.create(0o750)
        sink = JsonLinesSink(directory.metrics, 0, clock=lambda: 5.0)
        for step, loss in enumerate(losses, 1):
            sink.log(step, {"train/loss": loss, "throughput/samples_per_s": 100.0 + len(name)})
        sink.close()
        return directory

    return make


def test_steps_are_counted_up_to_the_first_difference(logged_run):
    straight, other = logged_run("straight", [3.0, 2.0, 1.0, 0.5]), logged_run("other", [3.0, 2.0, 1.5, 0.5])
    difference = find_first_difference(straight, other)
    assert (difference.step, difference.metrics) == (3, {"train/loss": (1.0, 1.5)})
    assert (difference.num_metrics, difference.num_steps) == (1, 3)
    same = find_first_difference(straight, straight)
    assert (same.step, same.num_metrics, same.num_steps) == (None, 1, 4)


def test_not_a_number_equals_itself(logged_run):
    run = logged_run("nan", [3.0, float("nan")])
    assert find_first_difference(run, run).step is None

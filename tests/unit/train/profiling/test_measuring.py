from __future__ import annotations

import itertools

import pytest
from torch import nn

from hpctrain.train.profiling.measuring import AT_ONCE, LONGEST_STRIDE, LOOK_EVERY_S, VARIED, Measuring


class Waited:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def looked_at(measuring, clock, supply, *, steps, step_s):
    """The steps that a loop would have timed, each of which took so many seconds."""
    micro_batches, found = supply(), []
    for step in range(steps):
        if step == measuring.next_step:
            measuring(step, micro_batches)
            found.append(step)
        clock.now += step_s
    return found


@pytest.fixture
def waited():
    return Waited()


@pytest.fixture
def measuring(step_over, lone_world, clock, waited):
    return Measuring(step_over(nn.Linear(8, 10)), lone_world, start_step=0, waited_s=waited, clock=clock)


def test_looks_are_a_quarter_of_a_second_apart_and_beat_against_nothing(measuring, clock, supply):
    found = looked_at(measuring, clock, supply, steps=1000, step_s=0.01)
    assert found[:AT_ONCE] == [1, 2, 3]
    strides = [later - earlier for earlier, later in itertools.pairwise(found[AT_ONCE:])]
    assert all(-0.02 < stride * 0.01 - LOOK_EVERY_S < VARIED * 0.01 for stride in strides)
    assert {step % 10 for step in found} == set(range(10))


def test_long_steps_are_all_looked_at_and_tiny_ones_rarely(measuring, clock, supply):
    assert looked_at(measuring, clock, supply, steps=20, step_s=5.0) == list(range(1, 20))


def test_no_stride_is_too_long_for_a_run_that_slows_down(measuring, clock, supply):
    found = looked_at(measuring, clock, supply, steps=5000, step_s=1e-7)
    assert found[-1] - found[-2] <= LONGEST_STRIDE + VARIED


def test_the_report_tells_the_wait_for_data_of_all_steps(measuring, clock, supply, waited):
    assert measuring.report(0).steps_timed == 0
    looked_at(measuring, clock, supply, steps=11, step_s=1.0)
    waited.seconds = 5.0
    report = measuring.report(11)
    assert (report.rank, report.steps_timed) == (0, 10)
    assert report.parts["data"] == 0.5
    assert set(report.parts) == {"data", "forward", "backward", "optimizer"}
    assert report.memory_peak_bytes > 0


def test_the_share_of_waiting_is_of_the_time_in_between(measuring, clock, waited):
    share, before = measuring.data_share(None)
    assert share == 0
    clock.now += 10
    waited.seconds += 4
    share, before = measuring.data_share(before)
    assert share == pytest.approx(0.4)
    assert measuring.data_share(before)[0] == 0

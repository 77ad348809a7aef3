from __future__ import annotations

import pytest
import torch
from fakes import Clock

from hpctrain.train.profiling.stopwatch import DeviceStopwatch, HostStopwatch, stopwatch


def test_what_was_done_since_the_last_mark_belongs_to_a_part():
    clock = Clock()
    watch = HostStopwatch(clock)
    watch.begin()
    for part, seconds in (("data", 1), ("forward", 2), ("data", 4), ("forward", 8), ("optimizer", 16)):
        clock.now += seconds
        watch.mark(part)
    assert watch.take() == [{"data": 5.0, "forward": 10.0, "optimizer": 16.0}]
    assert watch.take() == []


def test_a_step_that_was_not_ended_is_forgotten():
    clock = Clock()
    watch = HostStopwatch(clock)
    watch.begin()
    watch.mark("data")
    watch.begin()
    clock.now += 3
    watch.mark("forward")
    assert watch.take() == [{"forward": 3.0}]


def test_each_device_has_its_own():
    assert isinstance(stopwatch(torch.device("cpu")), HostStopwatch)
    assert isinstance(stopwatch(torch.device("cuda", 0)), DeviceStopwatch)


def test_a_device_without_a_finished_step_has_nothing_to_give():
    assert DeviceStopwatch(torch.device("cuda", 0)).take() == []


def test_the_real_clock_runs():
    watch = HostStopwatch()
    watch.begin()
    sum(range(10_000))
    watch.mark("forward")
    assert watch.take()[0]["forward"] == pytest.approx(0, abs=60)

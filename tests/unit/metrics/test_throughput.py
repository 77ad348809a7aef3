from __future__ import annotations

import pytest
from fakes import Clock

from hpctrain.metrics.throughput import Throughput


def test_each_window_is_for_itself():
    clock = Clock()
    throughput = Throughput(samples_seen=4000, clock=clock)
    clock.now += 10
    assert throughput.rate(6000) == 200.0
    clock.now += 10
    assert throughput.rate(12000) == 600.0


def test_time_paused_belongs_to_no_window():
    clock = Clock()
    throughput = Throughput(samples_seen=0, clock=clock)
    clock.now += 4
    with throughput.paused():
        clock.now += 1000
    clock.now += 1
    assert throughput.rate(100) == 20.0
    clock.now += 5
    assert throughput.rate(200) == 20.0


def test_a_pause_that_raises_still_ends():
    clock = Clock()
    throughput = Throughput(samples_seen=0, clock=clock)

    def evaluate():
        with throughput.paused():
            clock.now += 7
            raise RuntimeError

    with pytest.raises(RuntimeError):
        evaluate()
    clock.now += 2
    assert throughput.rate(2) == 1.0


def test_no_time_is_no_speed():
    assert Throughput(samples_seen=0, clock=Clock()).rate(0) == 0.0

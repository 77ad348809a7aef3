from __future__ import annotations

import random

import pytest

from hpctrain.train.profiling.memory_growth import MAX_READINGS, MemoryGrowth

MB = 2**20


def grown(used, steps):
    growth = MemoryGrowth()
    for step in range(steps):
        growth.add(step, int(used(step)))
    return growth.bytes_per_step()


@pytest.mark.parametrize("steps", [12, 60, 1000])
def test_a_steady_rise_is_found(steps):
    draws = random.Random(0)
    rate = 400 * MB / steps
    found = grown(lambda step: 300 * MB + rate * step + draws.uniform(0, rate), steps)
    assert found == pytest.approx(rate, rel=0.2)


@pytest.mark.parametrize(
    "used",
    [
        lambda step: 300 * MB,
        lambda step: 300 * MB + min(step, 150) * MB,  # a cache that fills
        lambda step: 300 * MB + (200 * MB if step > 100 else 0),  # an evaluation's memory, once
        lambda step: 300 * MB + step % 50 * MB,
        lambda step: 300 * MB + step * 4096,  # too little to matter
        lambda step: 4000 * MB + step * MB / 2,  # a small share of what is in use
        lambda step: 500 * MB - step * MB,
    ],
)
def test_other_shapes_are_not_growth(used):
    assert grown(used, 300) == 0


def test_too_few_readings_are_not_growth():
    assert grown(lambda step: step * 100 * MB, 6) == 0


def test_readings_are_thinned_out():
    growth = MemoryGrowth()
    for step in range(10_000):
        growth.add(step, step)
    assert len(growth._readings) <= MAX_READINGS
    assert growth._readings[-1][0] > 9_000

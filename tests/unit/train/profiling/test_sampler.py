from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn

from hpctrain.data.fetch import BatchFetcher, TensorBatches
from hpctrain.data.loader import TrainLoader
from hpctrain.data.order import sequential
from hpctrain.data.plan import BatchPlan
from hpctrain.train.profiling.sampler import (
    LONGEST_STRIDE,
    MAX_READINGS,
    SAMPLE_EVERY_S,
    SAMPLES_AT_START,
    VARIATION,
    MemoryGrowth,
    StepSampler,
)

PLAN = BatchPlan(12, global_batch_size=12, micro_batch_size=6, world_size=1, drop_last=False)


def sampled(sampler, clock, supply, *, steps, step_s):
    """Do the steps that a loop would have timed, each of which takes so many seconds; return them."""
    micro_batches, found = supply(), []
    for step in range(steps):
        if step == sampler.next_step:
            sampler.do_step(step, micro_batches)
            found.append(step)
        clock.now += step_s
    return found


@pytest.fixture
def loader():
    order = sequential
    return TrainLoader(BatchFetcher(TensorBatches(torch.zeros(12, 8)), 0), order, PLAN, rank=0)


@pytest.fixture
def sampler(step_over, lone_world, loader, clock):
    return StepSampler(step_over(nn.Linear(8, 10)), lone_world, loader, next_step=1, clock=clock)


def test_samples_are_a_quarter_of_a_second_apart_and_fall_on_all_steps(sampler, clock, supply):
    found = sampled(sampler, clock, supply, steps=1000, step_s=0.01)
    assert found[:SAMPLES_AT_START] == [1, 2, 3]
    strides = [later - earlier for earlier, later in itertools.pairwise(found[SAMPLES_AT_START:])]
    assert all(-0.02 < stride * 0.01 - SAMPLE_EVERY_S < VARIATION * 0.01 for stride in strides)
    assert {step % 10 for step in found} == set(range(10))


def test_all_long_steps_are_timed(sampler, clock, supply):
    assert sampled(sampler, clock, supply, steps=20, step_s=5.0) == list(range(1, 20))


def test_strides_are_bounded_for_runs_that_slow_down(sampler, clock, supply):
    found = sampled(sampler, clock, supply, steps=5000, step_s=1e-7)
    assert found[-1] - found[-2] <= LONGEST_STRIDE + VARIATION


def test_the_report_has_the_wait_for_data_of_all_steps(sampler, clock, supply, loader):
    assert sampler.report(0).steps_timed == 0
    sampled(sampler, clock, supply, steps=11, step_s=1.0)
    loader.waited_s = 5.0
    report = sampler.report(11)
    assert (report.rank, report.steps_timed) == (0, 10)
    assert report.parts["data"] == 0.5
    assert set(report.parts) == {"data", "forward", "backward", "optimizer"}
    assert report.memory_peak_bytes > 0


def test_data_share_is_of_the_time_since_the_last_call(sampler, clock, loader):
    assert sampler.data_share() == 0
    clock.now += 10
    loader.waited_s += 4
    assert sampler.data_share() == pytest.approx(0.4)
    assert sampler.data_share() == 0


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

from __future__ import annotations

import itertools
import logging

import pytest
from torch import nn

from hpctrain.config.compose import Composer
from hpctrain.data.plan import BatchPlan
from hpctrain.run.bottleneck import read_bottleneck
from hpctrain.run.times import Times
from hpctrain.train.profiling.observation import Observation

PLAN = BatchPlan(1200, global_batch_size=12, micro_batch_size=6, world_size=1, drop_last=False)


@pytest.fixture
def observe(step_over, lone_world, clock, tmp_path):
    """Makes an observation by words of the configuration, over a small model."""
    composer = Composer()

    def build(*words, start_step=0, model=None, flops=None):
        times = Times(0.0, clock)
        times.keep_in(tmp_path)
        times.enter("first_step_s")
        step = step_over(model or nn.Linear(8, 10))
        found = Observation(
            composer.compose(list(words)),
            step,
            PLAN,
            lone_world,
            times,
            start_step=start_step,
            total_steps=50,
            num_workers=0,
            waited_s=lambda: 0.0,
            agreed_s=lambda: 0.0,
            flops_per_sample=flops,
            trace=tmp_path / "rank_0.pt.trace.json",
            clock=clock,
        )
        return found, step, times

    return build


def trained(observed, supply, clock, *, begin, end, step_s=1.0):
    """Does steps as the loop does; those that were looked at."""
    observation, step, times = observed
    micro_batches, looked = supply(), []
    for number in range(begin, end):
        if number == observation.next_step:
            observation(number, micro_batches)
            looked.append(number)
        else:
            step(number, micro_batches)
        clock.now += step_s
        if number == begin:
            times.enter("train_s")
        observation.window(number + 1, 12.0)
    return looked


def test_the_first_step_is_for_counting_and_later_ones_are_timed(observe, supply, clock, tmp_path, caplog):
    observed = observe()
    with caplog.at_level(logging.INFO, "hpctrain.train"):
        assert trained(observed, supply, clock, begin=0, end=12) == list(range(12))
        observed[0].conclude(12)
    found = read_bottleneck(tmp_path)
    # forward, and the gradients of the weights
    assert found.flops_per_sample == 2 * 2 * 8 * 10
    assert (found.step, found.steps_timed) == (12, 11)
    assert found.samples_per_s_per_device == 12.0
    assert caplog.messages[0].startswith("flops       3840 FLOP per step, 320 FLOP per sample")
    assert caplog.messages[-1] == f"verdict: {found.text}"


def test_what_an_earlier_attempt_counted_is_taken_over(observe, supply, clock, tmp_path):
    observed = observe(start_step=20, flops=7.0)
    trained(observed, supply, clock, begin=20, end=24)
    observed[0].conclude(24)
    assert read_bottleneck(tmp_path).flops_per_sample == 7.0


def test_a_compiled_model_is_counted_before_its_second_step(observe, supply, clock, tmp_path):
    model = nn.Linear(8, 10)
    model.compile(backend="eager")
    observed = observe(model=model)
    trained(observed, supply, clock, begin=0, end=4)
    observed[0].conclude(4)
    assert read_bottleneck(tmp_path).flops_per_sample == 2 * 2 * 8 * 10


def test_an_attempt_without_a_step_leaves_no_verdict(observe, tmp_path):
    observe(start_step=50)[0].conclude(50)
    assert read_bottleneck(tmp_path) is None


def test_without_measuring_nothing_is_looked_at_but_what_is_traced(observe, supply, clock, tmp_path):
    observed = observe("logger.measure=false", "trainer.profile=[3,4]")
    assert trained(observed, supply, clock, begin=0, end=8) == [2, 3]
    observed[0].conclude(8)
    assert read_bottleneck(tmp_path) is None
    assert (tmp_path / "rank_0.pt.trace.json").exists()


def test_values_of_the_machine_come_once_a_second(observe, supply, clock):
    observation, *_ = observe()
    found = []
    for step in range(1, 41):
        clock.now += 0.1
        found.append(bool(observation.window(step, 100.0)))
    assert sum(found) == 4
    assert all(
        later - earlier >= 10 for earlier, later in itertools.pairwise(i for i, told in enumerate(found) if told)
    )
    clock.now += 1
    assert set(observation.window(41, 100.0)) == {
        "throughput/samples_per_s_per_device",
        "throughput/waiting_for_data",
        "memory/peak_gb",
    }

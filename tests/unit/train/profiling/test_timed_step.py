from __future__ import annotations

import torch
from torch import nn

from hpctrain.train.profiling.stopwatch import HostStopwatch
from hpctrain.train.profiling.timed_step import PartTimer


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10))


def test_its_parts_are_timed_in_their_order(step_over, supply):
    watch = HostStopwatch()
    step = step_over(network())
    step(0, supply(), PartTimer(step.model, watch))
    assert [part for part, _ in watch._marks] == ["", *["data", "forward", "backward"] * 2, "optimizer"]
    (laps,) = watch.take()
    assert all(seconds > 0 for seconds in laps.values())


def test_a_timed_step_is_a_step_like_any_other(step_over, supply):
    plain, other = step_over(network()), step_over(network())
    timer = PartTimer(other.model, HostStopwatch())
    straight, mixed = supply(), supply()
    for step in range(6):
        plain(step, straight)
        other(step, mixed, timer if step % 2 else None)
    for expected, found in zip(plain.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(expected, found)
    assert plain._meter.means() == other._meter.means()


def test_it_takes_its_own_micro_batches_and_leaves_the_rest(step_over, supply):
    micro_batches = supply()
    step = step_over(network())
    step(0, micro_batches, PartTimer(step.model, HostStopwatch()))
    third = next(micro_batches)
    assert not third.is_last

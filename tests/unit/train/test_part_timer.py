from __future__ import annotations

import torch
from torch import nn

from hpctrain.train.profiling.sampler import LastGradient, PartTimer

CPU = torch.device("cpu")


def test_the_time_since_the_last_mark_counts_for_the_part(clock):
    timer = PartTimer(CPU, clock)
    timer.begin()
    for part, seconds in (("data", 1), ("forward", 2), ("data", 4), ("forward", 8), ("optimizer", 16)):
        clock.now += seconds
        timer.mark(part)
    assert timer.take() == [{"data": 5.0, "forward": 10.0, "optimizer": 16.0}]
    assert timer.take() == []


def test_without_finished_steps_there_are_no_times():
    assert PartTimer(torch.device("cuda", 0)).take() == []


def test_after_the_first_backward_only_the_last_gradient_is_watched():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    last, calls = LastGradient(model.parameters()), []
    features = torch.ones(2, 4)
    for expected in (6, 1, 1):
        loss = model(features).sum()
        last.watch(lambda: calls.append(1))
        loss.backward()
        assert last.settle()
        assert len(calls) == expected
        calls.clear()
    model(features).sum().backward()
    assert calls == []
    assert not last.settle()


def test_all_are_watched_again_if_the_last_one_gets_no_gradient():
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    last, calls = LastGradient([*first.parameters(), *second.parameters()]), []
    features = torch.ones(1, 2)
    found = []
    for both in (True, False, False, True):
        loss = second(first(features) if both else features).sum()
        last.watch(lambda: calls.append(1))
        loss.backward()
        found.append((last.settle(), len(calls)))
        calls.clear()
    assert found[:3] == [(True, 4), (False, 0), (True, 2)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10))


def test_parts_of_a_step_are_timed_in_their_order(step_over, supply):
    step = step_over(network())
    timer = PartTimer(CPU)
    step(0, supply(), timer)
    assert [part for part, _ in timer._steps[0]] == ["", *["data", "forward", "backward"] * 2, "optimizer"]
    (laps,) = timer.take()
    assert all(seconds > 0 for seconds in laps.values())


def test_a_timed_step_computes_what_a_plain_one_does(step_over, supply):
    plain, other = step_over(network()), step_over(network())
    timer = PartTimer(CPU)
    straight, mixed = supply(), supply()
    for step in range(6):
        plain(step, straight)
        other(step, mixed, timer if step % 2 else None)
    for expected, found in zip(plain.turns[0].module.trained, other.turns[0].module.trained, strict=True):
        assert torch.equal(expected, found)
    assert plain.turns[0].loss.meter.means() == other.turns[0].loss.meter.means()


def test_a_timed_step_takes_only_its_own_micro_batches(step_over, supply):
    micro_batches = supply()
    step = step_over(network())
    step(0, micro_batches, PartTimer(CPU))
    third = next(micro_batches)
    assert not third.is_last

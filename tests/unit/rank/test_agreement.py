from __future__ import annotations

import itertools
import signal

import pytest
import torch
import torch.distributed as dist

from hpctrain.rank.agreement import (
    COST_SHARE,
    MAX_STEPS,
    NOTHING,
    Agreement,
    Decision,
    LoadingStop,
    StopWhileLoading,
)
from hpctrain.rank.stop_request import Stop, StopKind, StopRequest
from hpctrain.rank.world import World

CPU = torch.device("cpu")


class TickingClock:
    """A clock that every look moves by a tick."""

    def __init__(self, tick_s: float) -> None:
        self.now = 0.0
        self.tick_s = tick_s

    def __call__(self) -> float:
        self.now += self.tick_s
        return self.now


@pytest.fixture
def world(tmp_path):
    """One rank with a process group of its own: its collectives are real, and return at once."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield World(rank=0, size=2, local_rank=0, devices=(CPU,), control=dist.group.WORLD)
    dist.destroy_process_group()


@pytest.fixture
def gaps(world):
    """Steps between agreements that cost so much, of steps that take so long."""

    def measure(*, cost_s: float, step_s: float, restarted: bool = False) -> list[int]:
        clock = TickingClock(cost_s)
        agreement = Agreement(world, StopRequest(), clock=clock)
        assert agreement.agree_and_calibrate() is None
        agreement = agreement.restarted() if restarted else agreement
        clock.tick_s = 0.0
        agreed = []
        for step in range(1, 4000):
            clock.now += step_s
            if agreement.decide(step, save=True).save:
                agreed.append(step)
        return [later - earlier for earlier, later in itertools.pairwise(agreed)]

    return measure


@pytest.mark.parametrize("restarted", [False, True])
def test_agreements_are_as_frequent_as_their_cost_allows(gaps, restarted):
    found = gaps(cost_s=0.001, step_s=0.01, restarted=restarted)
    expected = 0.001 / COST_SHARE / 0.01
    assert found[-1] == pytest.approx(expected, abs=1)
    assert all(gap <= expected + 1 for gap in found)


def test_expensive_agreements_are_a_second_apart(gaps):
    assert gaps(cost_s=3.0, step_s=0.01)[-1] == pytest.approx(100, abs=1)


def test_the_number_of_tiny_steps_between_agreements_is_bounded(gaps):
    assert gaps(cost_s=0.1, step_s=1e-7)[-1] == pytest.approx(MAX_STEPS, abs=1)


def test_long_steps_are_agreed_upon_one_by_one(gaps):
    assert set(gaps(cost_s=0.001, step_s=0.5)[2:]) == {1}


def test_a_rank_alone_decides_for_itself():
    request = StopRequest()
    agreement = Agreement(World(rank=0, size=1, local_rank=0, devices=(CPU,)), request)
    assert agreement.agree_and_calibrate() is None
    assert agreement.decide(1, save=False) is NOTHING
    assert agreement.decide(2, save=True) == Decision(save=True)
    request.fail(OSError("no space left"))
    assert agreement.decide(3, save=False) == Decision(Stop(StopKind.ERROR))
    assert agreement.agree_and_calibrate() == Stop(StopKind.ERROR)


@pytest.fixture
def waiting():
    """Three ranks that wait for the batch of a step, of which the second one has got a signal."""
    store, at = dist.HashStore(), [7]
    world = World(rank=0, size=3, local_rank=0, devices=(CPU,), store=store)
    ranks = [LoadingStop(StopRequest(), world, lambda: f"step/{at[0]}") for _ in range(3)]
    ranks[1]._stop.ask(signal.SIGTERM)
    return ranks, at


def stops(call):
    try:
        call()
    except StopWhileLoading:
        return True
    return False


def test_ranks_stop_while_they_wait_once_all_of_them_do(waiting):
    (first, second, third), _ = waiting
    first.poll()
    assert not first.is_counted, "no rank has a request that it knows of"
    for rank in (second, first):
        rank.poll()
        assert rank.is_counted
    third.at_boundary = False
    third.poll()
    assert not third.is_counted, "in the middle of a step it can't leave"
    third.at_boundary = True
    assert stops(third.poll)
    assert stops(first.poll)
    assert stops(second.arrived), "too late to continue, though its batch is there"


def test_no_rank_leaves_before_a_step_that_another_one_has_begun(waiting):
    (first, second, third), at = waiting
    second.poll()
    first.poll()
    first.arrived()
    assert not any(map(stops, (third.poll, second.poll, second.poll)))
    assert not second.is_counted
    at[0] += 1
    assert not any(map(stops, (first.poll, second.poll, first.poll))), "the first one has heard of it only now"
    assert stops(third.poll)
    assert stops(first.poll)


def test_a_rank_alone_stops_at_once_also_by_its_handler():
    request = StopRequest()
    loading = LoadingStop(request)

    def fetch(sends_signal):
        if sends_signal:
            request._handle(signal.SIGTERM, None)
        return "batch"

    loading.poll()
    assert loading.fetch(fetch, False) == "batch"
    assert stops(lambda: loading.fetch(fetch, True))
    assert request._on_signal is None
    assert stops(lambda: loading.fetch(fetch, False))
    assert stops(loading.poll)
    loading.at_boundary = False
    loading.poll()

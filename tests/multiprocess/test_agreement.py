"""A flag on any rank is acted upon by all after the same step."""

from __future__ import annotations

import pytest

from hpctrain.rank.stop_request import StopKind


@pytest.fixture
def agree(ranks):
    def run(world_size, *, steps=2000, interval_s=0.05, step_s=0.001, stop_at=None, save_at=None, **more):
        def each(value, default):
            return [(value or {}).get(rank, default) for rank in range(world_size)]

        step_s = step_s if isinstance(step_s, dict) else dict.fromkeys(range(world_size), step_s)
        done = ranks(
            "agreeing:be_rank",
            steps,
            interval_s,
            each(step_s, 0.0),
            each(stop_at, 0),
            each(save_at, 0),
            more.get("slow"),
            more.get("error_on"),
            world_size=world_size,
        )
        # the program ends only if every collective that one rank issued was issued by all
        assert all(process.code == 0 for process in done), "\n".join(process.output for process in done)
        return [process.result for process in done]

    return run


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("step", [1, 2, 3, 4, 57])
def test_one_rank_is_asked_to_stop_and_all_do_after_the_same_step(agree, world_size, step):
    results = agree(world_size, stop_at={world_size - 1: step})
    (stopped,) = {result["step"] for result in results}
    assert all(result["made"] == [[stopped, 9 + world_size, False]] for result in results)
    assert step <= stopped < 2000
    assert results[-1]["waited_s"] < 10


def test_ranks_of_different_speed(agree):
    results = agree(3, step_s={0: 0.0, 1: 0.004, 2: 0.001}, stop_at={0: 40})
    (stopped,) = {result["step"] for result in results}
    assert all(result["made"] == [[stopped, 10, False]] for result in results)


def test_ranks_that_received_different_signals_agree_on_the_largest(agree):
    results = agree(3, stop_at={0: 30, 1: 30, 2: 900})
    assert {tuple(result["made"][0][1:]) for result in results} == {(11, False)}


def test_an_error_on_one_rank_comes_before_signals_on_others(agree):
    results = agree(3, stop_at={0: 30, 1: 30, 2: 900}, error_on=0)
    assert {tuple(result["made"][0][1:]) for result in results} == {(11, False)}
    assert [result["kinds"] for result in results] == [[StopKind.ERROR]] * 3


def test_a_request_before_the_first_step_is_known_to_all(agree):
    assert [result["start"] for result in agree(3, steps=1, stop_at={1: -1})] == [11] * 3
    assert [result["start"] for result in agree(2, steps=1)] == [None] * 2


def test_steps_as_long_as_the_interval_are_decided_upon_at_once(agree):
    results = agree(2, interval_s=0.02, step_s=0.03, steps=30, stop_at={1: 12})
    assert [result["made"] for result in results] == [[[12, 11, False]]] * 2


def test_every_rank_asks_for_something_else(agree):
    results = agree(3, interval_s=0.01, step_s=0.002, stop_at={2: 120}, save_at={0: 30, 1: 60})
    made = results[0]["made"]
    assert [decision[1:] for decision in made] == [[0, True], [0, True], [12, False]]
    assert 30 <= made[0][0] < 60 <= made[1][0] < 120 <= made[2][0]
    assert all(result["made"] == made for result in results)


def test_no_rank_asks_for_anything(agree):
    """For every last step, even one at which an agreement has only begun."""
    for steps in (1, 2, 3, 4):
        assert [result["made"] for result in agree(2, steps=steps)] == [[], []]


def test_a_rank_alone_decides_at_once(agree):
    (result,) = agree(1, stop_at={0: 7}, save_at={0: 3})
    assert result["made"] == [[3, 0, True], [7, 10, False]]


@pytest.mark.parametrize("world_size", [2, 3])
def test_steps_that_suddenly_grow_slow_delay_a_stop_by_one_interval_of_fast_steps(agree, world_size):
    results = agree(world_size, interval_s=0.1, step_s=0.005, slow={150: 0.1}, stop_at={1: 160}, steps=300)
    (stopped,) = {result["step"] for result in results}
    assert 160 <= stopped <= 160 + 0.1 / 0.005 + 1
    assert all(result["made"] == [[stopped, 11, False]] for result in results)


def test_steps_of_changing_length(agree):
    slow = {step: (0.06 if step // 100 % 2 else 0.0003) for step in range(100, 1200, 100)}
    slow |= {step + 8: 0.0003 for step in range(100, 1200, 200)}
    results = agree(3, interval_s=0.05, slow=slow, steps=1200, stop_at={2: 1108})
    assert len({tuple(map(tuple, result["made"])) for result in results}) == 1

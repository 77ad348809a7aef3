"""`session.should_stop` gives all ranks the same answer, and leaves nothing that the end of a group waits for."""

from __future__ import annotations

import pytest


@pytest.fixture
def ask(ranks):
    def run(world_size, *, steps=400, signalled=None, step_s=0.0, lag_s=0.0):
        def each(value, default):
            return [(value or {}).get(rank, default) for rank in range(world_size)]

        step_s = each(step_s if isinstance(step_s, dict) else None, 0.0 if isinstance(step_s, dict) else step_s)
        done = ranks("asking:be_rank", steps, each(signalled, 0), step_s, lag_s, world_size=world_size)
        assert all(process.code == 0 for process in done), "\n".join(process.output for process in done)
        results = [process.result for process in done]
        assert max(result["left_s"] for result in results) < 10
        return results

    return run


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_rank_is_signalled_and_all_stop_after_the_same_step(ask, world_size):
    results = ask(world_size, signalled={world_size - 1: 57})
    answers = results[0]["answers"]
    assert all(result["answers"] == answers for result in results)
    assert answers[-1]
    assert not any(answers[:-1])
    assert 57 <= len(answers) <= 57 + 33
    assert [result["again"] for result in results] == [True] * world_size


def test_ranks_of_different_speed_and_signals_at_different_steps(ask):
    results = ask(3, steps=90, step_s={1: 0.03, 2: 0.01}, signalled={0: 40, 1: 9, 2: 60})
    assert {len(result["answers"]) for result in results} <= {9, 10, 11}
    assert len({tuple(result["answers"]) for result in results}) == 1


def test_long_steps_stop_at_once(ask):
    results = ask(2, steps=4, step_s=0.55, signalled={1: 3})
    assert [result["answers"] for result in results] == [[False, False, True]] * 2


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 50])
def test_a_pending_answer_does_not_hold_up_the_end(ask, steps):
    """The first rank leaves while the last one has yet to make its last call."""
    results = ask(3, steps=steps, step_s=0.02, lag_s=0.3)
    assert [result["answers"] for result in results] == [[False] * steps] * 3

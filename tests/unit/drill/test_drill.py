"""The moments at which a drill interrupts, and the display of its progress."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.drill.drill import Console, Moment, Plan, TimePlan, enough_steps, signal_of
from hpctrain.drill.launched_run import AttemptProgress


@given(
    interruptions=st.integers(1, 8),
    seed=st.integers(0, 10),
    total=st.integers(2, 500),
    reaction=st.integers(0, 40),
    late=st.integers(0, 40),
    first_evaluation=st.integers(0, 500),
)
def test_every_interruption_comes_after_a_step_and_leaves_others_time(
    interruptions, seed, total, reaction, late, first_evaluation
):
    plan = Plan(interruptions, seed, total, reaction, first_evaluation)
    is_long = total > 2 * interruptions * (reaction + 2)
    done = 0
    for number in range(interruptions):
        target = plan.target(done, number)
        assert target > done
        if is_long:
            assert target + reaction < total
        done = min(total, target + min(late, reaction))
        if done == total:
            assert not is_long
            return


def test_a_seed_gives_the_same_drill_and_another_one_another():
    def drawn(seed):
        plan = Plan(3, seed, 1000, 5)
        return [(plan.target(done, number), signal_of(number, 3, seed)) for number, done in enumerate((0, 300, 600))]

    assert drawn(1) == drawn(1)
    assert len({step for seed in range(20) for step, _ in drawn(seed)}) > 40
    assert {name for seed in range(20) for _, name in drawn(seed)} == {signal.SIGTERM, signal.SIGINT}


@given(
    interruptions=st.integers(2, 8),
    seed=st.integers(0, 10),
    first_evaluation=st.integers(50, 200),
    reaction=st.integers(0, 40),
    late=st.integers(0, 40),
)
def test_the_first_interruption_comes_before_the_first_evaluation_and_the_second_after_it(
    interruptions, seed, first_evaluation, reaction, late
):
    plan = Plan(interruptions, seed, 600, reaction, first_evaluation)
    done = plan.target(0, 0) + min(late, reaction)
    assert done < first_evaluation < plan.target(done, 1)


def test_the_whole_training_is_hit():
    targets = [Plan(1, seed, 100, 0).target(0, 0) for seed in range(400)]
    assert (min(targets), max(targets)) == (1, 99)


@pytest.mark.parametrize(("reaction_s", "step_s", "steps"), [(1.5, 0.01, 684), (0.15, 0.01, 77), (1.5, 10.0, 10)])
def test_how_long_a_drill_must_be(reaction_s, step_s, steps):
    assert enough_steps(3, reaction_s, step_s) == pytest.approx(steps, abs=1)


def test_without_steps_the_attempts_are_interrupted_within_the_duration():
    for seed in range(50):
        plan = TimePlan(3, seed, 10.0)
        moments = [plan.moment(0, number).running_s for number in range(3)]
        assert all(2.0 < moment < 4.5 for moment in moments)
        # even if each attempt continued where the one before was interrupted
        assert sum(moment - 2.0 for moment in moments) < 8.0
    assert 2.0 < TimePlan(1, 0, 10.0).moment(0, 0).running_s < 10.0


def test_without_steps_an_interruption_comes_after_the_first_save():
    moments = [TimePlan(1, seed, 10.0, first_save_s=6.0).moment(0, 0) for seed in range(50)]
    assert all(moment.after_save for moment in moments)
    assert 1.0 < min(moment.running_s for moment in moments) < max(moment.running_s for moment in moments) < 4.0
    # a save at the end says nothing
    assert TimePlan(1, 0, 10.0, first_save_s=9.9).moment(0, 0) == TimePlan(1, 0, 10.0).moment(0, 0)


def test_a_moment_is_a_step_or_a_time():
    step, seconds, saved = Moment(step=5), Moment(running_s=2.0), Moment(running_s=1.0, after_save=True)
    shown = ["after step 5", "2.0 s after its start", "1.0 s after its first save"]
    assert [str(moment) for moment in (step, seconds, saved)] == shown
    assert [step.is_reached(AttemptProgress(done, 100.0)) for done in (None, 4, 5)] == [False, False, True]
    assert [seconds.is_reached(AttemptProgress(9, running_s)) for running_s in (1.9, 2.0)] == [False, True]
    assert not saved.is_reached(AttemptProgress(None, 9.0))
    assert [saved.is_reached(AttemptProgress(None, 9.0, first)) for first in (8.5, 8.0)] == [False, True]


class Stream:
    def __init__(self, terminal):
        self.terminal, self.text = terminal, ""

    def isatty(self):
        return self.terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize(("terminal", "text"), [(True, "\r\x1b[Ka: step 1\r\x1b[Kdone\n"), (False, "done\n")])
def test_steps_are_shown_on_a_terminal_alone(terminal, text):
    stream = Stream(terminal)
    console = Console(stream)
    console.show_step("a", 1)
    console.show_step("a", 2)
    console.report("done")
    assert stream.text == text

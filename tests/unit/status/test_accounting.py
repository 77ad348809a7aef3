from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.run.ledger import Attempt
from hpctrain.run.reason import Reason
from hpctrain.run.times import SPENT
from hpctrain.status.accounting import WallTime, account
from hpctrain.status.state import RunState

START = {"import_s": 2.0, "rendezvous_s": 1.0, "build_s": 1.0, "load_s": 0.5, "first_step_s": 0.5}


def attempt(number, launched, steps, end_time, reason=None, *, start=START, job_id="12", **extra):
    begin, end = steps
    known = {} if reason is None else {"reason": reason, "end_step": end, "end_time": end_time}
    return Attempt(
        attempt=number,
        job_id=job_id,
        nodes=("n1",),
        world_size=1,
        start_step=begin,
        start_time=launched + sum(start.values()),
        launched=launched,
        **start,
        **extra,
        **known,
    )


def nonzero(spent):
    return {name: value for name, value in asdict(spent).items() if value}


def test_a_run_without_attempts():
    found = account([], [], state=RunState.UNKNOWN, saved_step=0, now=50.0)
    assert (found.attempts, found.spent, found.steps_lost) == ((), WallTime(), 0)
    assert (found.spent.ratio, found.spent.shares) == (None, {})


def test_an_uninterrupted_local_run():
    one = attempt(1, 100.0, (0, 50), 206.0, Reason.COMPLETED, train_s=80.0, eval_s=15.0, save_s=5.0, job_id=None)
    found = account([one], [], state=RunState.COMPLETED, saved_step=50, now=9e9)
    expected = {"starting_s": 5, "training_s": 80, "evaluating_s": 15, "saving_s": 5, "stopping_s": 1}
    assert nonzero(found.spent) == expected
    assert (found.attempts[0].steps, found.steps_lost) == (50, 0)
    assert found.spent.ratio == pytest.approx(95 / 106)
    assert found.spent.shares["training"] == pytest.approx(80 / 106)


def test_a_job_that_was_requeued_and_lost_steps():
    attempts = [
        attempt(1, 130.0, (0, 100), 240.0, Reason.PREEMPTED, train_s=100.0, save_s=5.0, next="requeue"),
        attempt(
            2, 300.0, (100, 100), 999.0, Reason.NODE_FAILURE, train_s=60.0, last_step=160, seen=370.0, closed_late=1
        ),
        attempt(3, 500.0, (100, 200), 605.0, Reason.COMPLETED, train_s=100.0),
    ]
    submissions = [{"job_id": "12", "time": 100.0}, {"cancelled": True, "time": 1.0}, {"job_id": "7", "time": 290.0}]
    found = account(attempts, submissions, state=RunState.COMPLETED, saved_step=200, now=9e9)
    first, second, third = (nonzero(one.spent) for one in found.attempts)
    assert first == {"queued_s": 30, "starting_s": 5, "training_s": 100, "saving_s": 5}
    # 60 steps up to the last sign, of which none was saved, and 5 s of silence
    assert second == {"queued_s": 60, "starting_s": 5, "lost_s": 65}
    # the dead node was noticed, and the job came back, in the 130 s since
    assert third == {"queued_s": 130, "starting_s": 5, "training_s": 100}
    assert [one.steps_lost for one in found.attempts] == [0, 60, 0]
    assert found.spent.total_s == 505
    assert found.spent.ratio == pytest.approx(200 / 505)


def test_a_damaged_checkpoint_costs_an_earlier_attempt_its_steps_too():
    attempts = [
        attempt(1, 0.0, (0, 100), 105.0, Reason.PREEMPTED, train_s=80.0, eval_s=20.0),
        attempt(2, 110.0, (100, 140), 155.0, Reason.PREEMPTED, train_s=40.0),
        attempt(3, 160.0, (75, 200), 290.0, Reason.COMPLETED, train_s=125.0),
    ]
    found = account(attempts, [], state=RunState.COMPLETED, saved_step=200, now=0.0)
    assert [one.steps_lost for one in found.attempts] == [25, 40, 0]
    assert nonzero(found.attempts[0].spent) == {"starting_s": 5, "training_s": 60, "evaluating_s": 15, "lost_s": 25}


def test_new_ranks_in_the_same_allocation_waited_in_no_queue():
    attempts = [
        attempt(1, 100.0, (0, 10), 115.0, Reason.INFRASTRUCTURE, train_s=10.0, next="restart", saved_step=10),
        attempt(2, 117.0, (10, 20), 132.0, Reason.COMPLETED, train_s=10.0),
    ]
    found = account(attempts, [{"job_id": "12", "time": 90.0}], state=RunState.COMPLETED, saved_step=20, now=0.0)
    assert nonzero(found.attempts[1].spent) == {"starting_s": 7, "training_s": 10}


def test_a_hang_is_lost_until_it_is_ended():
    one = attempt(1, 0.0, (0, 10), 1815.0, Reason.HANG, train_s=10.0, last_step=10, saved_step=0)
    found = account([one], [], state=RunState.FAILED, saved_step=0, now=0.0)
    assert nonzero(found.spent) == {"starting_s": 5, "lost_s": 1810}
    assert (found.steps_lost, found.spent.ratio) == (10, 0)


@pytest.mark.parametrize(
    ("state", "extra", "expected", "lost"),
    [
        (RunState.RUNNING, {"train_s": 80.0, "save_s": 2.0}, {"training_s": 93, "saving_s": 2}, 0),
        (RunState.RUNNING, {"first_step_s": 0.0}, {"starting_s": 95}, 0),
        (RunState.INTERRUPTED, {"train_s": 80.0, "seen": 90.0}, {"training_s": 60, "lost_s": 25}, 10),
    ],
)
def test_an_attempt_without_an_end(state, extra, expected, lost):
    start = {name: seconds for name, seconds in START.items() if name not in extra}
    extra = {name: seconds for name, seconds in extra.items() if seconds}
    one = attempt(1, 0.0, (0, 0), 0.0, start=start, last_step=40, **extra)
    found = account([one], [], state=state, saved_step=30, now=100.0)
    expected["starting_s"] = expected.get("starting_s", 0) + 5
    assert nonzero(found.spent) == expected
    assert found.steps_lost == lost


def test_a_program_that_reports_no_steps_works_from_its_start():
    one = attempt(1, 100.0, (0, 0), 161.0, Reason.PREEMPTED, start={"import_s": 1.0}, train_s=60.0)
    found = account([one], [], state=RunState.QUEUED, saved_step=0, now=161.0)
    assert nonzero(found.spent) == {"starting_s": 1, "training_s": 60}


def test_a_program_that_reports_no_saves_resumes_before_its_first_step():
    first = attempt(1, 100.0, (0, 50), 155.0, Reason.PREEMPTED, train_s=50.0)
    second = attempt(2, 200.0, (0, 90), 255.0, Reason.COMPLETED, train_s=50.0, resumed_step=40)
    found = account([first, second], [], state=RunState.COMPLETED, saved_step=0, now=255.0)
    assert [(one.steps, one.steps_lost) for one in found.attempts] == [(50, 10), (50, 0)]
    assert found.spent.lost_s == 10


def test_a_run_that_waits_for_its_next_attempt():
    one = attempt(1, 0.0, (0, 10), 20.0, Reason.PREEMPTED, train_s=10.0)
    submissions = [{"job_id": "12", "time": -5.0}]
    found = account([one], submissions, state=RunState.QUEUED, saved_step=10, now=100.0)
    assert found.spent.queued_s == 5 + 80
    resumed = [*submissions, {"job_id": "13", "time": 70.0}]
    assert account([one], resumed, state=RunState.QUEUED, saved_step=10, now=100.0).spent.queued_s == 5 + 30
    assert account([one], resumed, state=RunState.INTERRUPTED, saved_step=10, now=100.0).spent.queued_s == 5
    assert account([], submissions, state=RunState.QUEUED, saved_step=0, now=100.0).spent.queued_s == 105


def test_the_time_until_a_resume_is_not_counted():
    attempts = [
        attempt(1, 0.0, (0, 10), 15.0, Reason.INTERRUPTED, train_s=10.0, job_id=None),
        attempt(2, 5000.0, (10, 20), 5015.0, Reason.COMPLETED, train_s=10.0, job_id=None),
    ]
    assert account(attempts, [], state=RunState.COMPLETED, saved_step=20, now=0.0).spent.total_s == 30


def test_a_ledger_without_times():
    attempts = [
        Attempt(attempt=1, start_step=0, start_time=10.0, reason=Reason.PREEMPTED, end_step=50, end_time=60.0),
        Attempt(attempt=2, start_step=40, start_time=70.0, reason=Reason.COMPLETED, end_step=90, end_time=120.0),
        Attempt(attempt=3),
    ]
    found = account(attempts, [], state=RunState.COMPLETED, saved_step=90, now=0.0)
    assert nonzero(found.spent) == {"training_s": 90, "lost_s": 10}
    assert [(one.steps, one.steps_lost) for one in found.attempts] == [(50, 10), (50, 0), (None, 0)]


seconds = st.none() | st.floats(-10.0, 1e6)
steps = st.none() | st.integers(0, 1000)


@st.composite
def histories(draw):
    """Whatever crashes, skewed clocks and lost lines may leave."""
    found = []
    for number in range(draw(st.integers(0, 5))):
        names = [*SPENT, "launched", "seen"]
        extra = {name: draw(seconds) for name in names if draw(st.booleans())}
        extra |= draw(st.sampled_from([{}, {"next": "restart"}, {"closed_late": True}]))
        found.append(
            Attempt(
                attempt=number + 1,
                job_id=draw(st.sampled_from([None, "12", "13"])),
                start_step=draw(steps),
                start_time=draw(seconds),
                reason=draw(st.none() | st.sampled_from(Reason)),
                end_step=draw(steps),
                end_time=draw(seconds),
                last_step=draw(steps),
                **extra,
            )
        )
    return found


submissions = st.lists(st.fixed_dictionaries({"job_id": st.sampled_from(["12", "13"]), "time": st.floats(-10.0, 1e6)}))


@given(histories(), submissions, st.sampled_from(RunState), st.integers(0, 1000), st.floats(0, 1e6))
def test_no_second_is_lost_or_counted_twice(attempts, submissions, state, saved_step, now):
    found = account(attempts, submissions, state=state, saved_step=saved_step, now=now)
    assert all(value >= 0 for value in asdict(found.spent).values())
    assert len(found.attempts) == len(attempts)
    for one in found.attempts:
        assert all(value >= -1e-6 for value in asdict(one.spent).values())
        assert 0 <= one.steps_lost <= (one.steps or 0)
    if found.spent.total_s:
        assert sum(found.spent.shares.values()) == pytest.approx(1)
        assert 0 <= found.spent.ratio <= 1
    parts = [sum(asdict(one.spent).values()) for one in found.attempts]
    assert sum(parts) <= found.spent.total_s * (1 + 1e-9) + 1e-6

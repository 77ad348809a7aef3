"""The cause of a stop, from what SLURM 22.05.8 said while the signal's flag was up (captured/stops.txt)."""

import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.attempt.termination import Cause, diagnose
from hpctrain.scheduler import answers
from hpctrain.scheduler.state import JobState

CAPTURED = (Path(__file__).parent / "captured" / "stops.txt").read_text()
STOPS = {
    name: (signal.Signals[word], answers.scontrol(answer)[0], float(now))
    for name, word, now, answer in re.findall(r"=== (\w+) (\w+) now=(\S+)\n(.*?)(?=\n=== |\Z)", CAPTURED, re.DOTALL)
}


def diagnosed(name, **changes):
    received, record, now = STOPS[name]
    return diagnose(received, replace(record, **changes), restarts=0, now=now)


@pytest.mark.parametrize(
    ("name", "cause", "left_s", "requeued"),  # a job that is being killed has no deadline
    [
        ("time_limit_near", Cause.TIME_LIMIT, 50, False),
        ("time_limit_over", Cause.TIME_LIMIT, None, False),
        ("preempted", Cause.PREEMPTED, 9, False),
        ("preempted_by_user_signal", Cause.PREEMPTED, 9, False),
        ("preempted_cancel", Cause.PREEMPTED, 10, False),
        ("preempted_without_grace", Cause.PREEMPTED, None, True),
        ("preempted_cancel_without_grace", Cause.PREEMPTED, None, False),
        ("cancelled", Cause.CANCELLED, None, False),
        ("peer_died", Cause.UNKNOWN, None, False),
        ("node_failed", Cause.PREEMPTED, None, True),
        ("requeued_by_hand", Cause.PREEMPTED, None, True),
    ],
)
def test_what_slurm_said(name, cause, left_s, requeued):
    diagnosis = diagnosed(name)
    left = None if diagnosis.deadline is None else round(diagnosis.deadline - STOPS[name][2])
    assert (diagnosis.cause, left, diagnosis.requeued) == (cause, left_s, requeued)
    assert diagnosis.ending == (left_s is None and cause is not Cause.UNKNOWN)
    assert STOPS[name][0].name in diagnosis.evidence


def test_a_job_that_was_requeued_before_isn_t_taken_for_one_that_is_now():
    received, record, now = STOPS["cancelled"]
    assert diagnose(received, replace(record, restarts=3), restarts=3, now=now).cause is Cause.CANCELLED
    assert diagnose(received, replace(record, restarts=3), restarts=2, now=now).cause is Cause.PREEMPTED


@pytest.mark.parametrize("state", [JobState.COMPLETING, JobState.NODE_FAIL])
def test_a_job_that_may_not_be_requeued_and_loses_a_node(state):
    """Seen on 22.05 with Requeue=0: COMPLETING for KillWait, Reason=NodeDown, Restarts and PreemptTime as before."""
    assert diagnosed("cancelled", state=state, reason="NodeDown").cause is Cause.NODE_FAILURE


@pytest.mark.parametrize("state", [JobState.COMPLETING, JobState.CANCELLED])
def test_a_cancelled_job_stays_cancelled_in_whatever_state_it_is_seen(state):
    assert diagnosed("cancelled", state=state).cause is Cause.CANCELLED


@pytest.mark.parametrize(
    ("received", "cause"),
    [
        (signal.SIGUSR1, Cause.TIME_LIMIT),
        (signal.SIGUSR2, Cause.TIME_LIMIT),
        (signal.SIGTERM, Cause.UNKNOWN),
        (signal.SIGINT, Cause.UNKNOWN),
        (None, Cause.UNKNOWN),
    ],
)
def test_without_an_answer_only_the_warning_signal_says_something(received, cause):
    diagnosis = diagnose(received, None, restarts=0, now=0.0)
    assert (diagnosis.cause, diagnosis.deadline) == (cause, None)
    assert "could not be asked" in diagnosis.evidence


def test_a_sigterm_after_the_time_limit_while_the_job_still_counts_as_running():
    received, record, _ = STOPS["peer_died"]
    assert record.end_time is not None
    assert diagnose(received, record, restarts=0, now=record.end_time + 1).cause is Cause.TIME_LIMIT


def test_a_sigterm_long_before_the_time_limit_is_a_peers_death_or_a_persons_kill():
    assert diagnosed("peer_died").cause is Cause.UNKNOWN

"""Why SLURM ends a job, from what SLURM 22.05.8 printed while the signal's flag was up (captured/stops.txt)."""

import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.attempt.termination import FILE_NAME, Termination, diagnose
from hpctrain.files import write_json
from hpctrain.run.reason import Reason
from hpctrain.scheduler import command
from hpctrain.scheduler.job import JobState

CAPTURED = (Path(__file__).parent / "captured" / "stops.txt").read_text()
STOPS = {
    name: (signal.Signals[word], command.scontrol(answer)[0], float(now))
    for name, word, now, answer in re.findall(r"=== (\w+) (\w+) now=(\S+)\n(.*?)(?=\n=== |\Z)", CAPTURED, re.DOTALL)
}


def terminated(name, **changes):
    received, record, now = STOPS[name]
    return diagnose(received, replace(record, **changes), restarts=0, now=now)


@pytest.mark.parametrize(
    ("name", "reason", "left_s", "requeued"),  # a job that is being killed has no deadline
    [
        ("time_limit_near", Reason.TIME_LIMIT, 50, False),
        ("time_limit_over", Reason.TIME_LIMIT, None, False),
        ("preempted", Reason.PREEMPTED, 9, False),
        ("preempted_by_user_signal", Reason.PREEMPTED, 9, False),
        ("preempted_cancel", Reason.PREEMPTED, 10, False),
        ("preempted_without_grace", Reason.PREEMPTED, None, True),
        ("preempted_cancel_without_grace", Reason.PREEMPTED, None, False),
        ("cancelled", Reason.CANCELLED, None, False),
        ("peer_died", None, None, False),
        ("node_failed", Reason.PREEMPTED, None, True),
        ("requeued_by_hand", Reason.PREEMPTED, None, True),
    ],
)
def test_what_slurm_said(name, reason, left_s, requeued):
    termination = terminated(name)
    left = None if termination.deadline is None else round(termination.deadline - STOPS[name][2])
    assert (termination.reason, left, termination.requeued) == (reason, left_s, requeued)
    assert termination.killing == (left_s is None and reason is not None)
    assert STOPS[name][0].name in termination.evidence
    assert ("=" in termination.evidence, "JobState=" in termination.record) == (False, True)


def test_the_evidence_is_in_words_and_names_no_signal_that_was_not_received():
    words = {name: terminated(name).evidence for name in STOPS}
    assert words["time_limit_near"] == "SLURM sent SIGUSR2 before the time limit"
    assert words["time_limit_over"] == "the time limit was reached (SIGTERM)"
    assert words["preempted"] == "SLURM preempted the job (SIGTERM)"
    assert words["cancelled"] == "the job was cancelled (SIGTERM)"
    _, record, now = STOPS["requeued_by_hand"]
    found = diagnose(None, record, restarts=0, now=now)
    assert (found.evidence, found.logged) == ("SLURM requeued the job", f"SLURM requeued the job; {found.record}")


def test_a_job_that_was_requeued_before_isn_t_taken_for_one_that_is_now():
    received, record, now = STOPS["cancelled"]
    assert diagnose(received, replace(record, restarts=3), restarts=3, now=now).reason is Reason.CANCELLED
    assert diagnose(received, replace(record, restarts=3), restarts=2, now=now).reason is Reason.PREEMPTED


def test_a_running_job_is_not_requeued_whatever_slurm_counts():
    """A count that differs from SLURM_RESTART_COUNT all the time must not turn each signal into a preemption."""
    received, record, now = STOPS["peer_died"]
    found = diagnose(received, replace(record, restarts=1), restarts=0, now=now)
    assert (found.reason, found.requeued) == (None, False)
    received, record, now = STOPS["time_limit_near"]
    assert diagnose(received, replace(record, restarts=1), restarts=0, now=now).reason is Reason.TIME_LIMIT


@pytest.mark.parametrize("state", [JobState.COMPLETING, JobState.NODE_FAIL])
def test_a_job_that_may_not_be_requeued_and_loses_a_node(state):
    """Seen on 22.05 with Requeue=0: COMPLETING for KillWait, Reason=NodeDown, Restarts and PreemptTime as before."""
    assert terminated("cancelled", state=state, reason="NodeDown").reason is Reason.NODE_FAILURE


@pytest.mark.parametrize("state", [JobState.COMPLETING, JobState.CANCELLED])
def test_a_cancelled_job_stays_cancelled_in_whatever_state_it_is_seen(state):
    assert terminated("cancelled", state=state).reason is Reason.CANCELLED


@pytest.mark.parametrize(
    ("received", "reason"),
    [
        (signal.SIGUSR1, Reason.TIME_LIMIT),
        (signal.SIGUSR2, Reason.TIME_LIMIT),
        (signal.SIGTERM, None),
        (signal.SIGINT, None),
        (None, None),
    ],
)
def test_without_an_answer_only_the_warning_signal_says_something(received, reason):
    termination = diagnose(received, None, restarts=0, now=0.0)
    assert (termination.reason, termination.deadline) == (reason, None)
    assert "didn't answer" in termination.evidence


def test_a_job_that_slurm_has_put_back_into_the_queue_without_counting_it_is_not_cancelled():
    """As one whose launch SLURM takes for failed, while its batch script runs ("launch failed requeued held")."""
    found = terminated("peer_died", state=JobState.PENDING)
    assert (found.reason, found.requeued, found.killing) == (Reason.PREEMPTED, True, True)


def test_a_sigterm_after_the_time_limit_while_the_job_still_counts_as_running():
    received, record, _ = STOPS["peer_died"]
    assert record.end_time is not None
    assert diagnose(received, record, restarts=0, now=record.end_time + 1).reason is Reason.TIME_LIMIT


def test_a_sigterm_long_before_the_time_limit_is_a_peers_death_or_a_persons_kill():
    assert terminated("peer_died").reason is None


def test_a_record_without_a_known_reason_is_none(tmp_path):
    assert Termination.read(tmp_path) is None
    found = Termination(Reason.PREEMPTED, "SIGTERM", 12.5, requeued=True, killing=True)
    found.write(tmp_path)
    assert Termination.read(tmp_path) == found
    # as earlier versions wrote it
    write_json(tmp_path / FILE_NAME, {"reason": "preempted", "evidence": "SIGTERM"})
    assert Termination.read(tmp_path) == Termination(Reason.PREEMPTED, "SIGTERM")
    write_json(tmp_path / FILE_NAME, {"reason": "meteorite", "evidence": "SIGTERM"})
    assert Termination.read(tmp_path) is None
    Termination(None, "SIGTERM").write(tmp_path)
    assert Termination.read(tmp_path) is None

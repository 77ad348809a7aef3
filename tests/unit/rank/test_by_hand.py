"""Ranks that were started by hand record their end, and ask for nothing; with a fake SLURM."""

from __future__ import annotations

import re
import signal
import time

import pytest

from hpctrain.attempt.outcome import Outcome
from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.rank.rank import record_own_end
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from tests.unit.supervising import STOPS

ENVIRONMENT = ClusterEnvironment.from_environment({"SLURM_JOB_ID": "7"})
STILL_TO_COME = re.compile(r" EndTime=\d+")
"""The captured jobs' time is over by now."""


def with_time_left(stop):
    return STILL_TO_COME.sub(f" EndTime={int(time.time()) + 90}", STOPS[stop])


def record(directory, reason, report="", stop_signal=None):
    """Record the end of a new attempt of job 7; returns what the ledger holds of it."""
    ledger = Ledger(directory)
    record_own_end(directory, ledger.claim(), Outcome(reason, 14, report, stop_signal=stop_signal), ENVIRONMENT)
    return ledger.attempts()[-1]


@pytest.mark.parametrize("reason", [Reason.PREEMPTED, Reason.TIME_LIMIT, Reason.FAILED, Reason.COMPLETED])
def test_the_end_is_recorded_with_the_job_and_nothing_follows(directory, slurm, reason):
    slurm.job(with_time_left("preempted"))
    end = record(directory, reason, "what happened\nwhere")
    assert (end.reason, end.end_step, end.detail, end.job_id) == (reason, 14, "what happened", "7")
    assert (end.next, end.requeued_by) == (None, None)
    assert (slurm.requeued, slurm.submitted) == ([], "")


@pytest.mark.parametrize(
    ("stop", "number", "reasons"),
    [
        ("preempted", signal.SIGTERM, [Reason.PREEMPTED, Reason.FAILED]),
        ("time_limit_near", signal.SIGUSR2, [Reason.TIME_LIMIT, Reason.FAILED]),
        ("peer_died", signal.SIGTERM, [Reason.FAILED, Reason.FAILED]),
        ("preempted", None, [Reason.FAILED, Reason.FAILED]),
    ],
)
def test_an_error_after_a_signal_may_be_that_of_a_child_process_once(directory, slurm, stop, number, reasons):
    slurm.job(with_time_left(stop))
    ends = [record(directory, Reason.FAILED, "CppCompileError", number) for _ in range(2)]
    assert [end.reason for end in ends] == reasons
    assert all("CppCompileError" in end.detail for end in ends)
    assert not slurm.requeued


@pytest.mark.parametrize(
    ("stop", "reason"),
    [
        ("preempted", Reason.PREEMPTED),
        ("preempted_cancel_without_grace", Reason.PREEMPTED),
        ("cancelled", Reason.CANCELLED),
        ("peer_died", Reason.INTERRUPTED),
    ],
)
def test_a_controller_that_had_no_answer_before_the_save_is_asked_after_it(directory, slurm, stop, reason):
    slurm.job(with_time_left(stop))
    assert record(directory, Reason.INTERRUPTED).reason is reason
    assert not slurm.requeued


def test_a_controller_that_does_not_answer_leaves_the_reason_as_it_is(directory, slurm):
    slurm.fall_silent("scontrol")
    assert record(directory, Reason.INTERRUPTED).reason is Reason.INTERRUPTED


def test_a_second_ctrl_c_asks_nothing(directory, slurm):
    slurm.job(STOPS["preempted"])
    slurm.fall_silent("scontrol", times=1)
    assert record(directory, Reason.INTERRUPTED, "a second Ctrl-C").reason is Reason.INTERRUPTED
    assert (slurm.home / "silent_scontrol").read_text() == "1"


def test_an_end_that_another_rank_recorded_first_is_the_one_that_counts(directory, slurm):
    ledger = Ledger(directory)
    ledger.start(ledger.claim(), job_id="7", nodes=["n1"], world_size=2, step=0)
    ledger.end(1, reason=Reason.FAILED, step=9)
    record_own_end(directory, 1, Outcome(Reason.PREEMPTED, 14), ENVIRONMENT)
    assert [entry.reason for entry in ledger.attempts()] == [Reason.FAILED]

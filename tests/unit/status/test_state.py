from __future__ import annotations

import os
import socket
import time

import pytest

from hpctrain.run.ledger import Attempt
from hpctrain.run.owner import Owner
from hpctrain.run.reason import Reason
from hpctrain.status.state import Evidence, JobPhase, JobView, RunState, judge

PENDING = JobView(JobPhase.PENDING, "waiting for resources")
RUNNING = JobView(JobPhase.RUNNING)
NONE = Attempt(attempt=0)
CLAIMED = Attempt(attempt=1)
OPEN = Attempt(attempt=1, job_id="12", start_time=100.0, start_step=0)
HERE = Owner(socket.gethostname(), os.getpid(), time.time())
GONE = Owner(socket.gethostname(), os.getpid(), 0.0)
AWAY = Owner("another-host", 1, time.time())


def ended(reason, detail=""):
    return Attempt(attempt=1, job_id="12", start_time=100.0, end_time=200.0, reason=reason, detail=detail)


def on_slurm(attempt, view, **more):
    return Evidence(attempt=attempt, job_ids=("12",), jobs={"12": view}, **more)


def after(word):
    return JobView(JobPhase.ENDED, word)


@pytest.mark.parametrize(
    ("evidence", "state"),
    [
        # before the first attempt
        (on_slurm(NONE, PENDING), RunState.QUEUED),
        (on_slurm(NONE, RUNNING), RunState.STARTING),
        (on_slurm(NONE, after("CANCELLED")), RunState.CANCELLED),
        (on_slurm(NONE, after("FAILED")), RunState.FAILED),
        (on_slurm(NONE, after("NODE_FAIL")), RunState.INTERRUPTED),
        (on_slurm(NONE, None), RunState.INTERRUPTED),
        (on_slurm(NONE, None, cancelled_at=50.0), RunState.CANCELLED),
        (Evidence(attempt=NONE), RunState.UNKNOWN),
        (Evidence(attempt=NONE, job_ids=("12",)), RunState.UNKNOWN),
        # claimed, the ranks not yet begun
        (on_slurm(CLAIMED, RUNNING), RunState.STARTING),
        (on_slurm(CLAIMED, PENDING), RunState.QUEUED),
        (Evidence(attempt=CLAIMED, owner=HERE), RunState.STARTING),
        (Evidence(attempt=CLAIMED, owner=GONE), RunState.INTERRUPTED),
        # begun
        (on_slurm(OPEN, RUNNING), RunState.RUNNING),
        (on_slurm(OPEN, PENDING), RunState.QUEUED),
        (on_slurm(OPEN, None), RunState.INTERRUPTED),
        (on_slurm(OPEN, after("NODE_FAIL")), RunState.INTERRUPTED),
        (on_slurm(OPEN, after("TIMEOUT")), RunState.INTERRUPTED),
        (on_slurm(OPEN, after("OUT_OF_MEMORY")), RunState.FAILED),
        (on_slurm(OPEN, after("CANCELLED")), RunState.CANCELLED),
        (on_slurm(OPEN, None, cancelled_at=150.0), RunState.CANCELLED),
        (on_slurm(OPEN, RUNNING, cancelled_at=150.0), RunState.RUNNING),
        (on_slurm(OPEN, None, cancelled_at=50.0), RunState.INTERRUPTED),
        (Evidence(attempt=OPEN, job_ids=("12",)), RunState.UNKNOWN),
        (Evidence(attempt=OPEN, owner=HERE), RunState.RUNNING),
        (Evidence(attempt=OPEN, owner=GONE), RunState.INTERRUPTED),
        (Evidence(attempt=OPEN, owner=AWAY), RunState.UNKNOWN),
        (Evidence(attempt=OPEN), RunState.UNKNOWN),
        # ended
        (on_slurm(ended(Reason.COMPLETED), RUNNING), RunState.COMPLETED),
        (on_slurm(ended(Reason.COMPLETED), None, cancelled_at=300.0), RunState.COMPLETED),
        (on_slurm(ended(Reason.FAILED), RUNNING), RunState.FAILED),
        (on_slurm(ended(Reason.FAILED), None), RunState.FAILED),
        (on_slurm(ended(Reason.CANCELLED), RUNNING), RunState.CANCELLED),
        (on_slurm(ended(Reason.STALLED), None), RunState.FAILED),
        (on_slurm(ended(Reason.PREEMPTED), PENDING), RunState.QUEUED),
        (on_slurm(ended(Reason.PREEMPTED), RUNNING), RunState.STARTING),
        (on_slurm(ended(Reason.PREEMPTED), None), RunState.INTERRUPTED),
        (on_slurm(ended(Reason.TIME_LIMIT), None, cancelled_at=300.0), RunState.CANCELLED),
        (on_slurm(ended(Reason.HANG), RUNNING), RunState.STARTING),
        (on_slurm(ended(Reason.HANG), None), RunState.FAILED),
        (on_slurm(ended(Reason.INFRASTRUCTURE), None), RunState.FAILED),
        (Evidence(attempt=ended(Reason.INTERRUPTED)), RunState.INTERRUPTED),
        (Evidence(attempt=ended(Reason.INTERRUPTED), cancelled_at=150.0), RunState.CANCELLED),
        (Evidence(attempt=ended(Reason.INTERRUPTED), cancelled_at=50.0), RunState.INTERRUPTED),
        (Evidence(attempt=ended(Reason.INTERRUPTED), owner=HERE), RunState.INTERRUPTED),
    ],
)
def test_states(evidence, state):
    assert judge(evidence)[0] == state


def test_a_resume_after_a_failure_is_a_new_job():
    evidence = Evidence(attempt=ended(Reason.FAILED), job_ids=("12", "15"), jobs={"12": after("FAILED"), "15": RUNNING})
    assert judge(evidence)[0] == RunState.STARTING


def test_a_completed_run_may_be_made_longer():
    for view, state in ((PENDING, RunState.QUEUED), (RUNNING, RunState.STARTING), (None, RunState.COMPLETED)):
        evidence = Evidence(attempt=ended(Reason.COMPLETED), job_ids=("12", "15"), jobs={"12": None, "15": view})
        assert judge(evidence)[0] == state


def test_the_note_says_why():
    for evidence, note in (
        (on_slurm(NONE, PENDING), "waiting for resources"),
        (on_slurm(OPEN, RUNNING), ""),
        (on_slurm(OPEN, RUNNING, cancelled_at=50.0), ""),
        (on_slurm(OPEN, RUNNING, cancelled_at=150.0), "it was told to stop"),
        (Evidence(attempt=OPEN, owner=HERE, cancelled_at=150.0), "it was told to stop"),
        (on_slurm(OPEN, None), "SLURM no longer knows job 12, and attempt 1 recorded no end"),
        (on_slurm(NONE, after("FAILED")), "job 12 ended as FAILED, and no attempt began"),
        (on_slurm(ended(Reason.FAILED, "rank 3 on n3 failed"), None), "failed: rank 3 on n3 failed"),
        (Evidence(attempt=OPEN, owner=AWAY), "it was started on another-host: ask there"),
        (
            Evidence(attempt=ended(Reason.PREEMPTED), job_ids=("12",)),
            "preempted; whether it waits in the queue can't be asked from here",
        ),
    ):
        assert judge(evidence)[1] == note


def test_only_a_run_that_may_move_on_by_itself_may_change():
    assert {state for state in RunState if state.may_change} == {
        RunState.QUEUED,
        RunState.STARTING,
        RunState.RUNNING,
    }

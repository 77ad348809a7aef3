from __future__ import annotations

import os
import socket
import time
from dataclasses import replace

import pytest

from hpctrain.run.launcher import Owner
from hpctrain.run.ledger import Attempt
from hpctrain.run.reason import Reason
from hpctrain.scheduler.job import JobState, SlurmJob
from hpctrain.status.state import RunFacts, RunState, derive_state, job_that_may_run


def job(state, reason=""):
    return SlurmJob(job_id="12", number=12, state=JobState(state), reason=reason)


PENDING = job("PENDING", "Licenses")
RUNNING = job("RUNNING")
NONE = Attempt(attempt=0)
CLAIMED = Attempt(attempt=1)
OPEN = Attempt(attempt=1, job_id="12", start_time=100.0, start_step=0)
HERE = Owner(socket.gethostname(), os.getpid(), time.time())
GONE = Owner(socket.gethostname(), os.getpid(), 0.0)
AWAY = Owner("another-host", 1, time.time())


def ended(reason, detail=""):
    return Attempt(attempt=1, job_id="12", start_time=100.0, end_time=200.0, reason=reason, detail=detail)


def on_slurm(attempt, record, **more):
    return RunFacts(attempt=attempt, job_ids=("12",), jobs={"12": record}, **more)


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        # before the first attempt
        (on_slurm(NONE, PENDING), RunState.QUEUED),
        (on_slurm(NONE, RUNNING), RunState.STARTING),
        (on_slurm(NONE, job("CANCELLED")), RunState.CANCELLED),
        (on_slurm(NONE, job("FAILED")), RunState.FAILED),
        (on_slurm(NONE, job("NODE_FAIL")), RunState.INTERRUPTED),
        (on_slurm(NONE, None), RunState.INTERRUPTED),
        (on_slurm(NONE, None, cancelled_at=50.0), RunState.CANCELLED),
        (RunFacts(attempt=NONE), RunState.PREPARED),
        (RunFacts(attempt=NONE, job_ids=("12",)), RunState.UNKNOWN),
        (on_slurm(NONE, job("PENDING", "JobHeldUser")), RunState.HELD),
        # claimed, the ranks not yet begun
        (on_slurm(CLAIMED, RUNNING), RunState.STARTING),
        (on_slurm(CLAIMED, PENDING), RunState.QUEUED),
        (RunFacts(attempt=CLAIMED, owner=HERE), RunState.STARTING),
        (RunFacts(attempt=CLAIMED, owner=GONE), RunState.INTERRUPTED),
        # paused: its job may train another run, or be about to end
        (on_slurm(ended(Reason.PAUSED), RUNNING), RunState.PAUSED),
        (on_slurm(ended(Reason.PAUSED), None), RunState.PAUSED),
        (RunFacts(attempt=ended(Reason.PAUSED), job_ids=("12",)), RunState.PAUSED),
        (on_slurm(ended(Reason.PAUSED), PENDING), RunState.QUEUED),
        # begun
        (on_slurm(OPEN, RUNNING), RunState.RUNNING),
        (on_slurm(OPEN, PENDING), RunState.QUEUED),
        (on_slurm(OPEN, job("REQUEUE_HOLD")), RunState.HELD),
        (on_slurm(OPEN, None), RunState.INTERRUPTED),
        (on_slurm(OPEN, job("NODE_FAIL")), RunState.INTERRUPTED),
        (on_slurm(OPEN, job("TIMEOUT")), RunState.INTERRUPTED),
        (on_slurm(OPEN, job("OUT_OF_MEMORY")), RunState.FAILED),
        (on_slurm(OPEN, job("CANCELLED")), RunState.CANCELLED),
        (on_slurm(OPEN, None, cancelled_at=150.0), RunState.CANCELLED),
        (on_slurm(OPEN, RUNNING, cancelled_at=150.0), RunState.RUNNING),
        (on_slurm(OPEN, None, cancelled_at=50.0), RunState.INTERRUPTED),
        (RunFacts(attempt=OPEN, job_ids=("12",)), RunState.UNKNOWN),
        (RunFacts(attempt=OPEN, owner=HERE), RunState.RUNNING),
        (RunFacts(attempt=OPEN, owner=GONE), RunState.INTERRUPTED),
        (RunFacts(attempt=OPEN, owner=AWAY), RunState.UNKNOWN),
        (RunFacts(attempt=OPEN), RunState.UNKNOWN),
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
        (RunFacts(attempt=ended(Reason.INTERRUPTED)), RunState.INTERRUPTED),
        (RunFacts(attempt=ended(Reason.INTERRUPTED), cancelled_at=150.0), RunState.CANCELLED),
        (RunFacts(attempt=ended(Reason.INTERRUPTED), cancelled_at=50.0), RunState.INTERRUPTED),
        (RunFacts(attempt=ended(Reason.INTERRUPTED), owner=HERE), RunState.INTERRUPTED),
    ],
)
def test_states(facts, state):
    assert derive_state(facts)[0] == state


def test_a_resume_after_a_failure_is_a_new_job():
    facts = RunFacts(attempt=ended(Reason.FAILED), job_ids=("12", "15"), jobs={"12": job("FAILED"), "15": RUNNING})
    assert derive_state(facts)[0] == RunState.STARTING


@pytest.mark.parametrize(
    ("attempt", "number", "submitted", "state"),
    [
        (ended(Reason.INTERRUPTED), "15", 300.0, RunState.FAILED),
        (OPEN, "15", 300.0, RunState.FAILED),
        (ended(Reason.COMPLETED), "15", 300.0, RunState.FAILED),  # it was to train further
        (ended(Reason.COMPLETED), "12", 300.0, RunState.COMPLETED),  # two clocks
        (ended(Reason.INTERRUPTED), "15", 50.0, RunState.INTERRUPTED),  # two clocks
        (ended(Reason.INTERRUPTED), "12", 300.0, RunState.INTERRUPTED),  # two clocks
    ],
)
def test_a_newer_job_that_began_no_attempt_decides_the_state(attempt, number, submitted, state):
    jobs = {"12": job("TIMEOUT"), "15": job("FAILED")}
    facts = RunFacts(attempt=attempt, job_ids=("12", "15"), submission=(number, submitted), jobs=jobs)
    found, note = derive_state(facts)
    assert found is state
    assert note.endswith("no attempt began") is (found is RunState.FAILED)


def test_a_completed_run_may_be_made_longer():
    for record, state in ((PENDING, RunState.QUEUED), (RUNNING, RunState.STARTING), (None, RunState.COMPLETED)):
        facts = RunFacts(attempt=ended(Reason.COMPLETED), job_ids=("12", "15"), jobs={"12": None, "15": record})
        assert derive_state(facts)[0] == state


@pytest.mark.parametrize("cancelled_at", [None, 400.0])
def test_a_completed_run_whose_longer_job_was_cancelled_in_the_queue_is_cancelled(cancelled_at):
    jobs = {"12": None, "15": job("CANCELLED")}
    submitted = RunFacts(attempt=ended(Reason.COMPLETED), job_ids=("12", "15"), submission=("15", 300.0), jobs=jobs)
    assert derive_state(replace(submitted, cancelled_at=cancelled_at))[0] is RunState.CANCELLED


def test_the_note_gives_the_reason():
    for facts, note in (
        (on_slurm(NONE, PENDING), "it waits for a license (Licenses)"),
        (on_slurm(OPEN, RUNNING), ""),
        (on_slurm(OPEN, RUNNING, cancelled_at=50.0), ""),
        (on_slurm(OPEN, RUNNING, cancelled_at=150.0), "it was asked to stop"),
        (RunFacts(attempt=OPEN, owner=HERE, cancelled_at=150.0), "it was asked to stop"),
        (on_slurm(OPEN, None), "SLURM no longer knows job 12, and attempt 1 recorded no end"),
        (on_slurm(NONE, job("FAILED")), "job 12 ended as FAILED, and no attempt began"),
        (on_slurm(ended(Reason.FAILED, "rank 3 on n3 failed"), None), "rank 3 on n3 failed"),
        (RunFacts(attempt=ended(Reason.INTERRUPTED, "stopped after step 7")), "stopped after step 7"),
        (RunFacts(attempt=ended(Reason.HANG, "rank 3 hangs")), "hang: rank 3 hangs"),
        (RunFacts(attempt=OPEN, owner=AWAY), "it was started on another-host: run `status` there"),
        (
            RunFacts(attempt=ended(Reason.PREEMPTED), job_ids=("12",)),
            "preempted; it may be queued: SLURM can't be reached from here",
        ),
    ):
        assert derive_state(facts)[1] == note


def test_only_a_run_that_may_move_on_by_itself_may_change():
    assert {state for state in RunState if state.may_change} == {
        RunState.QUEUED,
        RunState.HELD,
        RunState.STARTING,
        RunState.RUNNING,
    }


@pytest.mark.parametrize(
    ("attempt", "more", "job_id"),
    [
        (NONE, {}, None),
        (NONE, {"submission": ("12", 50.0)}, "12"),
        (CLAIMED, {"submission": ("12", 50.0)}, "12"),
        (OPEN, {"submission": ("12", 50.0)}, "12"),
        (OPEN, {}, "12"),  # its user submitted it
        (OPEN, {"submission": ("13", 150.0)}, "13"),
        *((ended(reason), {"submission": ("12", 50.0)}, "12") for reason in Reason if reason.meaning.requeued),
        *((ended(reason), {"submission": ("12", 50.0)}, None) for reason in Reason if not reason.meaning.requeued),
        (ended(Reason.COMPLETED), {"submission": ("13", 300.0)}, "13"),
        (ended(Reason.COMPLETED), {"submission": ("12", 100.5)}, None),  # two clocks
        (replace(ended(Reason.INTERRUPTED), next="restart"), {"submission": ("12", 50.0)}, "12"),
        (replace(OPEN, job_id=None), {"submission": ("12", 50.0)}, None),
        (CLAIMED, {"submission": ("12", 50.0), "owner": GONE}, "12"),
        (CLAIMED, {"submission": ("12", 50.0), "owner": AWAY}, None),
    ],
)
def test_the_job_that_may_run_where_slurm_cant_be_asked(attempt, more, job_id):
    assert job_that_may_run(RunFacts(attempt=attempt, job_ids=("12", "13"), **more)) == job_id

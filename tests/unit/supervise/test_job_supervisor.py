from __future__ import annotations

import json
import re
import signal
import time
from dataclasses import replace

import pytest

from hpctrain.run.job_records import JobRecords, cancelled_at
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.scheduler.slurm import Slurm
from hpctrain.status.jobs import RunRecords
from hpctrain.supervise.job_supervisor import JobSupervisor
from hpctrain.supervise.signals import WATCHED
from tests.unit.supervising import COMPLETES, KILLED, RUNNING, STOPS, ends, story

PAUSES = ends("paused", 40)


@pytest.fixture
def job(slurm, monkeypatch):
    """Makes the supervisor of a job for several runs."""
    handlers = {number: signal.getsignal(number) for number in WATCHED}

    def make(restarts=0):
        monkeypatch.setattr("hpctrain.supervise.supervisor.STORAGE_S", 0.1)
        monkeypatch.setattr("hpctrain.supervise.job.SILENCE_S", 0.1)
        environ = slurm.environ | {"SLURM_RESTART_COUNT": str(restarts)}
        return JobSupervisor(environ, Slurm(environ, run=slurm.run))

    yield make
    signal.set_wakeup_fd(-1)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def two(supervisor, tmp_path):
    """Two runs that a job for several trains."""
    words = {"one": ["trainer.pause_at_step=30"], "two": []}
    found = [supervisor(f"run_dir={tmp_path}/{name}", *more, submitted=False) for name, more in words.items()]
    return [(one, one.plan) for one in found]


def reason(one):
    attempts = Ledger(one.directory).attempts()
    return attempts[-1].reason if attempts else None


def kinds(one):
    records = JobRecords(one.directory).read()
    return [next(kind for kind in ("began", "left", "cancelled") if record.get(kind)) for record in records]


def test_one_run_after_another(slurm, job, two):
    slurm.plan(PAUSES)
    (first, plan), (second, other) = two
    both = job()
    assert (both.run(plan), reason(first)) == ((4, False), Reason.PAUSED)
    slurm.plan(COMPLETES)
    assert (both.run(other), reason(second)) == ((0, False), Reason.COMPLETED)
    assert kinds(first) == kinds(second) == ["began", "left"]
    assert RunRecords.read(first.directory).present_job_ids == ()
    assert not slurm.requeued
    # a requeue that comes too late finds nothing to do
    assert (both.run(plan), reason(first)) == ((4, False), Reason.PAUSED)
    assert len(story(first)) == 1


def test_a_preempted_run_is_not_left(slurm, job, two):
    slurm.plan(ends("preempted", 14))
    first, plan = two[0]
    _, job_ends = job().run(plan)
    assert (reason(first), job_ends, slurm.requeued) == (Reason.PREEMPTED, True, ["7"])
    assert kinds(first) == ["began"]
    assert RunRecords.read(first.directory).present_job_ids == ("7",)


@pytest.mark.parametrize(("stop", "requeued"), [("preempted_cancel_without_grace", ["7"]), ("cancelled", [])])
def test_a_job_that_ends_while_a_run_pauses_comes_back_for_the_others(slurm, job, two, stop, requeued):
    slurm.plan(replace(PAUSES, job=STOPS[stop]))
    (first, plan), _ = two
    _, job_ends = job().run(plan)
    assert (reason(first), job_ends, slurm.requeued) == (Reason.PAUSED, True, requeued)
    assert kinds(first) == ["began", "left"]


def test_no_run_begins_in_a_job_whose_time_is_almost_over(slurm, job, two):
    slurm.plan(PAUSES)
    (_, plan), (second, other) = two
    both = job()
    assert both.run(plan) == (4, False)
    soon = re.sub(r" EndTime=\d+", f" EndTime={int(time.time()) + 60}", RUNNING)
    slurm.job(soon)
    _, job_ends = both.run(other)
    assert (reason(second), job_ends, slurm.requeued) == (None, True, ["7"])
    assert (kinds(second), story(second)) == ([], [])


def test_requeues_under_another_run_are_not_counted(slurm, job, two, unwritable):
    """The job has been requeued more often than a run may be without a record."""
    second, other = two[1]
    unwritable(None)
    _, job_ends = job(restarts=5).run(other)
    assert (reason(second), job_ends, slurm.requeued) == (None, True, ["7"])


def test_an_attempt_that_another_job_left_without_a_record_is_not_a_requeue_of_this_one(slurm, job, two):
    second, other = two[1]
    Ledger(second.directory).claim()
    slurm.plan(COMPLETES, first=2)
    job(restarts=3).run(other)
    assert reason(second) is Reason.COMPLETED
    closed = Ledger(second.directory).attempts()[0]
    assert (closed.reason, closed.requeued_by) == (Reason.INFRASTRUCTURE, None)


def test_a_cancellation_stays_when_the_job_leaves(slurm, job, two):
    slurm.plan(replace(KILLED, job=STOPS["cancelled"]))
    first, plan = two[0]
    _, job_ends = job().run(plan)
    assert (reason(first), job_ends) == (Reason.CANCELLED, True)
    records = JobRecords(first.directory)
    records.add({"cancelled": True, "time": time.time()})
    records.leave("7")
    assert cancelled_at(records.read()) is not None
    records.begin("8", 0)
    assert cancelled_at(records.read()) is None
    assert json.loads(first.directory.jobs.read_text().splitlines()[0])["began"]


def test_a_job_that_died_before_it_could_leave_counts_only_for_a_run_that_continues(two):
    """SLURM's record of the job then says nothing about a run that has ended for good."""
    (first, _), (second, _) = two
    for one, reason in ((first, Reason.PAUSED), (second, Reason.PREEMPTED)):
        JobRecords(one.directory).begin("7", 0)
        ledger = Ledger(one.directory)
        ledger.start(ledger.claim(), job_id="7", nodes=["n1"], world_size=1, step=0)
        ledger.end(1, reason=reason, step=40)
    assert RunRecords.read(first.directory).present_job_ids == ()
    assert RunRecords.read(second.directory).present_job_ids == ("7",)

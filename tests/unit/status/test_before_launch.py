from __future__ import annotations

import pytest

from hpctrain.run.job_records import JobRecords
from hpctrain.scheduler.job import JobState, SlurmJob
from hpctrain.status.before_launch import GONE, OtherRuns
from tests.unit.runs_before import end_attempt, run_before


def job(job_id, state):
    return SlurmJob(job_id=job_id, number=int(job_id), state=JobState(state))


def look(*runs, **jobs):
    """Look at runs; jobs by id and state, as j20="RUNNING"."""
    records = {name[1:]: job(name[1:], state) for name, state in jobs.items()}
    return OtherRuns.read([str(run.path) for run in runs], lambda ids: {one: records.get(one) for one in ids})


def test_completed_runs_are_left_out(tmp_path):
    assert look(run_before(tmp_path / "a", "completed")) == OtherRuns((), (), ())


def test_jobs_that_are_over_are_not_waited_for(tmp_path):
    run = run_before(tmp_path / "a", "preempted", job_id="20")
    JobRecords(run).add({"job_id": "21", "time": 2e9})
    found = look(run, j20="COMPLETED", j21="PENDING")
    assert [one.path for one in found.going] == [run.path]
    assert found.job_ids == ("21",)


@pytest.mark.parametrize("reason", ["failed", "cancelled", "paused", "interrupted", "hang"])
def test_a_run_that_nothing_continues_has_stopped(tmp_path, reason):
    found = look(run_before(tmp_path / "a", reason))
    assert (len(found.stopped), found.going) == (1, ())


def test_a_run_that_has_not_been_started_may_complete(tmp_path):
    assert len(look(run_before(tmp_path / "a")).going) == 1


def test_a_run_that_was_removed_has_stopped(tmp_path):
    run = run_before(tmp_path / "a")
    run.config.unlink()
    assert look(run).stopped[0].note == GONE


def test_without_slurm_s_answer_a_job_may_still_run(tmp_path):
    queued = run_before(tmp_path / "a", "preempted", job_id="20")
    failed = run_before(tmp_path / "b", job_id="30")
    end_attempt(failed, "failed", "30")
    found = OtherRuns.read([str(queued.path), str(failed.path)], lambda _: None)
    assert [one.path for one in found.going] == [queued.path]
    assert [one.path for one in found.stopped] == [failed.path]

"""A real SLURM starts runs after other runs have completed, whatever happens to the jobs of those."""

from __future__ import annotations

import itertools
import sys

import pytest

from hpctrain.status.run_status import read_statuses
from tests.slurm.programs.followed_run import FollowedRun
from tests.slurm.programs.submitted_runs import STEPS, SubmittedRuns

COMPLETED = [(0, "completed", STEPS)]


def command(run: FollowedRun, *words: str) -> str:
    """Type a command where the run was submitted; return what it printed."""
    typed = [sys.executable, "-m", "hpctrain", *words]
    done = run.sandbox.run(typed, cwd=run.directory.path.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def after(runs: SubmittedRuns, *others: FollowedRun, failure: str = "end") -> FollowedRun:
    """Submit a run that starts after others."""
    named = ",".join(str(one.directory.path) for one in others)
    return runs.train(f"after={named}", f"after_failure={failure}", pace_s=0, nodes=1)


def until_it_has_looked(run: FollowedRun, times: int = 1) -> None:
    """Wait until the run's job has started, looked, and is back in the queue."""
    run.until(lambda: run.batch_log.count("the run waits for") >= times, f"look {times}")
    run.until(lambda: run.record["JobState"] == "PENDING", "the queue")


def until_completed(run: FollowedRun) -> None:
    """Wait until the run has completed, in its first attempt."""
    assert run.until_ended() == "COMPLETED"
    assert run.story == COMPLETED, run


def assert_in_this_order(*runs: FollowedRun) -> None:
    """Each run began after the one before it had completed."""
    for before, after_it in itertools.pairwise(runs):
        ended, began = before.attempts[-1].end_time, after_it.attempts[0].start_time
        assert ended is not None
        assert began is not None
        assert ended < began, f"{before}\n{after_it}"


def test_a_run_waits_though_the_job_before_it_has_ended(runs: SubmittedRuns) -> None:
    """The first run is preempted and goes on in another job, so SLURM's dependency is satisfied too early."""
    first = runs.train("cluster.sbatch.requeue=false", nodes=1)
    second = after(runs, first)
    first.until_step(3)
    assert str(first.directory.path) in command(second, "status", str(second.directory.path))
    first.preempt()
    first.until_attempt(2)
    assert first.newest_job != first.job_id
    until_it_has_looked(second)
    assert second.attempts == []
    assert f"afterany:{first.newest_job}" in second.record["Dependency"]
    first.set_pace(0)
    assert first.until_ended() == "COMPLETED"
    until_completed(second)
    assert_in_this_order(first, second)


@pytest.mark.nightly
def test_a_run_waits_while_the_one_before_it_is_requeued(runs: SubmittedRuns) -> None:
    first = runs.train(nodes=1)
    second = after(runs, first)
    first.until_step(3)
    first.preempt()
    first.until_attempt(2)
    first.set_pace(0)
    assert first.until_ended() == "COMPLETED"
    until_completed(second)
    assert_in_this_order(first, second)


@pytest.mark.nightly
def test_a_chain_of_three(runs: SubmittedRuns) -> None:
    first = runs.train(nodes=1)
    second = after(runs, first)
    third = after(runs, second, first)
    first.until_step(3)
    first.set_pace(0)
    until_completed(first)
    until_completed(second)
    until_completed(third)
    assert_in_this_order(first, second, third)


@pytest.mark.nightly
def test_after_a_failed_run(runs: SubmittedRuns) -> None:
    first = runs.train("+task.act=1:0:12:raise", nodes=1)
    ended = after(runs, first)
    last = after(runs, ended)
    started = after(runs, first, failure="start")
    assert first.until_ended() == "FAILED"
    until_completed(started)
    for run, other in ((ended, first), (last, ended)):
        assert run.until_ended() == "FAILED"
        (attempt,) = run.attempts
        assert attempt.reason == "failed"
        assert attempt.after == str(other.directory.path)
        assert f"resume {run.directory.path}" in attempt.detail
        assert attempt.detail.count("resume that run") == 1
    # once it has been resumed, the next ones can be
    command(first, "resume", str(first.directory.path))
    command(ended, "resume", str(ended.directory.path))
    assert first.until_ended() == "COMPLETED"
    assert ended.until_ended() == "COMPLETED"
    assert ended.reasons == ["failed", "completed"]


@pytest.mark.nightly
def test_after_a_cancelled_run(runs: SubmittedRuns) -> None:
    first = runs.train(nodes=1)
    second = after(runs, first)
    first.until_step(3)
    command(first, "cancel", str(first.directory.path))
    first.until_ended()
    second.until_ended()
    assert second.reasons == ["cancelled"]


@pytest.mark.nightly
def test_a_run_waits_until_a_failed_one_is_resumed(runs: SubmittedRuns) -> None:
    first = runs.train("+task.act=1:0:12:raise", nodes=1)
    second = after(runs, first, failure="wait")
    assert first.until_ended() == "FAILED"
    until_it_has_looked(second)
    assert "failed" in command(second, "status", str(second.directory.path))
    command(first, "resume", str(first.directory.path))
    assert first.until_ended() == "COMPLETED"
    second.sandbox.ask("scontrol", "update", f"JobId={second.job_id}", "StartTime=now")
    assert second.until_ended() == "COMPLETED"
    assert second.reasons == ["completed"]


@pytest.mark.nightly
def test_a_waiting_run_is_cancelled(runs: SubmittedRuns) -> None:
    first = runs.train("+task.act=1:0:12:raise", nodes=1)
    second = after(runs, first, failure="wait")
    first.until_ended()
    until_it_has_looked(second)
    command(second, "cancel", str(second.directory.path))
    assert second.sandbox.wait_job(second.job_id, "CANCELLED")
    (status,) = read_statuses([second.directory], ask=lambda *_: {})
    assert str(status.state) == "cancelled"
    assert second.attempts == []


@pytest.mark.nightly
def test_the_runs_of_a_sweep_start_after_a_run(runs: SubmittedRuns) -> None:
    first = runs.train(nodes=1)
    swept = runs.sweep(2, f"after={first.directory.path}")
    first.until_step(3)
    assert all(run.attempts == [] for run in swept)
    first.set_pace(0)
    until_completed(first)
    for run in swept:
        run.set_pace(0)
        assert run.until_ended() == "COMPLETED"
        assert_in_this_order(first, run)

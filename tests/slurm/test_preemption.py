"""A real SLURM preempts, times out and cancels runs: each continues, or ends, as it should."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from tests.slurm.programs.followed_run import FollowedRun
from tests.slurm.programs.submitted_runs import STEPS, SubmittedRuns


def assert_nothing_was_lost(run: FollowedRun) -> None:
    """Each attempt began where the one before had stopped."""
    begun = [one.start_step for one in run.attempts]
    assert begun == [0, *(one.end_step for one in run.attempts[:-1])], run
    assert all(begun[1:]), run


def preempt_once(run: FollowedRun) -> str:
    """Preempt a run and let it finish; returns the job's last JobState."""
    run.until_step(3)
    run.preempt()
    run.until_attempt(2)
    run.set_pace(0)
    state = run.until_ended()
    assert run.record["Restarts"] in {"0", "1"}, f"requeued once more at its end, as since SLURM 24.05: {run}"
    return state


def preempt_twice(run: FollowedRun) -> None:
    run.until_step(3)
    run.preempt()
    run.until_attempt(2)
    run.until_step((run.attempts[1].start_step or 0) + 3)
    run.preempt()
    run.until_attempt(3)
    run.set_pace(0)


def on_sandbox(*options: str, nightly: bool = False) -> Any:
    """A parameter that stands for a sandbox with these options."""
    marks = [pytest.mark.sandbox(*options), *([pytest.mark.nightly] if nightly else [])]
    return pytest.param(marks=marks, id=" ".join(options))


@pytest.mark.parametrize(
    (), [on_sandbox(mode, nightly=True) for mode in ("--preempt-mode=CANCEL", "--preempt-send-user-signal")]
)
def test_preempted_by_other_rules(runs: SubmittedRuns) -> None:
    run = runs.train(nodes=1)
    assert preempt_once(run) == "COMPLETED"
    (_, _, stopped), _ = run.story
    assert run.story == [(0, "preempted", stopped), (stopped, "completed", STEPS)]
    assert {one.job_id for one in run.attempts} == {run.job_id}
    assert run.digest == runs.straight(processes=1)


@pytest.mark.nightly
def test_checkpoints_are_purged_while_a_preempted_run_waits(runs: SubmittedRuns) -> None:
    run = runs.train(nodes=1)
    run.until_step(3)
    run.sandbox.preempt(seconds=8)
    run.until(lambda: run.reasons == ["preempted"] and not run.ranks(), "the requeue")
    for path in run.directory.checkpoints.iterdir():
        shutil.rmtree(path)
    logged = run.directory.metrics.read_bytes()
    assert run.until_ended() == "FAILED"
    (_, _, stopped), (_, reason, _) = run.story
    assert (reason, len(run.attempts)) == ("failed", 2)
    assert f"expected the checkpoint of step {stopped}, which the run saved" in run.attempts[1].detail
    assert "resume.from_scratch=true" in run.attempts[1].detail
    assert run.directory.metrics.read_bytes() == logged


@pytest.mark.nightly
def test_preempted_twice(runs: SubmittedRuns) -> None:
    check_preempted_twice(runs, nodes=2)


@pytest.mark.nightly
@pytest.mark.parametrize((), [on_sandbox("--preempt-mode=CANCEL"), on_sandbox("--preempt-send-user-signal")])
def test_preempted_twice_by_other_rules(runs: SubmittedRuns) -> None:
    check_preempted_twice(runs, nodes=1)


def check_preempted_twice(runs: SubmittedRuns, nodes: int) -> None:
    run = runs.train(nodes=nodes)
    preempt_twice(run)
    assert run.until_ended() == "COMPLETED"
    (_, _, first), (_, _, second), _ = run.story
    # at any other code srun has the step killed, perhaps a minute later: it would hit the next incarnation
    assert run.batch_log.count("srun exited with code 0") == 3, run
    assert run.story == [(0, "preempted", first), (first, "preempted", second), (second, "completed", STEPS)]
    assert {one.job_id for one in run.attempts} == {run.job_id}
    assert run.digest == runs.straight(processes=nodes)


@pytest.mark.parametrize(
    (),
    [on_sandbox("--grace-time=0", nightly=True), on_sandbox("--grace-time=0", "--preempt-mode=CANCEL", nightly=True)],
)
def test_preempted_without_grace_time(runs: SubmittedRuns) -> None:
    """A step takes longer than SLURM waits, so the steps since the last checkpoint are lost."""
    run = runs.train("checkpoint.every_steps=10", pace_s=0.1, nodes=1)
    run.until_step(13)
    run.set_pace(60)
    run.until_step(14)
    run.preempt()
    run.until(lambda: not run.ranks(), "SIGKILL")
    run.set_pace(0)
    assert run.until_ended() == "COMPLETED"
    assert [(start, reason) for start, reason, _ in run.story] == [(0, "preempted"), (10, "completed")]
    assert run.attempts[0].job_id == run.attempts[1].job_id
    assert run.digest == runs.straight(processes=1)


@pytest.mark.parametrize(
    (),
    [on_sandbox("--grace-time=0", nightly=True), on_sandbox("--grace-time=0", "--preempt-mode=CANCEL")],
)
def test_without_grace_time_killwait_is_enough_for_a_small_save(runs: SubmittedRuns) -> None:
    run = runs.train(nodes=1)
    assert preempt_once(run) == "COMPLETED"
    (_, _, stopped), _ = run.story
    assert run.story == [(0, "preempted", stopped), (stopped, "completed", STEPS)]
    assert run.digest == runs.straight(processes=1)


@pytest.mark.nightly
@pytest.mark.sandbox("--grace-time=30")
def test_a_rank_that_hangs_at_its_exit_does_not_cost_the_requeue(runs: SubmittedRuns) -> None:
    run = runs.train("+task.act='1:1:1:linger'")
    assert preempt_once(run) == "COMPLETED"
    assert run.reasons == ["preempted", "completed"]
    assert_nothing_was_lost(run)
    assert "preempted: back to the queue" in run.batch_log, "the supervisor was killed before it could decide"


@pytest.mark.nightly
@pytest.mark.sandbox("--signal-children")
def test_a_child_process_that_the_signal_ends_fails_no_run(runs: SubmittedRuns) -> None:
    """Such as a compiler, which doesn't handle the signal."""
    run = runs.train("+task.act=1:0:5:child", "checkpoint.every_steps=2", nodes=1)
    run.until_step(4)
    run.preempt()
    run.until_attempt(2)
    run.set_pace(0)
    assert run.until_ended() == "COMPLETED"
    assert run.story == [(0, "preempted", 4), (4, "completed", STEPS)]
    assert "CalledProcessError" in run.attempts[0].detail
    assert run.digest == runs.straight(processes=1)


@pytest.mark.nightly
def test_four_ranks(runs: SubmittedRuns) -> None:
    """With more than two ranks DDP's first backward sums in another order than all later ones."""
    run = runs.train("cluster.processes_per_node=2")
    assert preempt_once(run) == "COMPLETED"
    assert run.reasons == ["preempted", "completed"]
    assert_nothing_was_lost(run)
    assert run.digest == runs.straight(processes=4)


@pytest.mark.soak
def test_four_nodes_of_two_ranks_preempted_twice(runs: SubmittedRuns) -> None:
    run = runs.train("cluster.processes_per_node=2", nodes=4)
    preempt_twice(run)
    assert run.until_ended() == "COMPLETED"
    assert run.reasons == ["preempted", "preempted", "completed"]
    assert_nothing_was_lost(run)
    assert run.digest == runs.straight(processes=8)


def test_near_the_time_limit(runs: SubmittedRuns) -> None:
    """On a busy machine an attempt may hardly have begun when SLURM sends the signal."""
    # SLURM looks every 30 s: the signal comes 15 to 45 s after the job's start
    words = ("cluster.time_limit_min=1", "cluster.signal_delay_s=15", "cluster.requeue.max_stalled_attempts=9")
    run = runs.train(*words, pace_s=1, nodes=1)
    run.until_attempt(2)
    run.set_pace(0)
    assert run.until_ended() == "COMPLETED"
    *stopped, last = run.attempts
    assert run.reasons == ["time_limit"] * len(stopped) + ["completed"]
    assert [one.end_step for one in stopped] == [one.start_step for one in run.attempts[1:]]
    assert last.end_step == STEPS
    assert {one.job_id for one in run.attempts} == {run.job_id}
    assert run.digest == runs.straight(processes=1)


@pytest.mark.nightly
def test_only_the_preempted_task_of_an_array_runs_again(runs: SubmittedRuns) -> None:
    """`scontrol requeue` of an array's own id would run the completed tasks again."""
    quick, slow = runs.sweep(2)
    slow.set_pace(1)  # it must not end before the other one
    quick.set_pace(0)
    quick.until_ended()
    assert preempt_once(slow) == "COMPLETED"
    assert slow.reasons == ["preempted", "completed"]
    assert_nothing_was_lost(slow)
    assert {one.job_id for one in slow.attempts} == {slow.job_id}
    assert slow.digest == runs.straight(processes=1)
    assert quick.story == [(0, "completed", STEPS)]
    assert runs.sandbox.job(quick.job_id)["Restarts"] == "0"


@pytest.mark.nightly
def test_where_the_job_can_t_be_requeued_a_new_one_continues_the_run(runs: SubmittedRuns) -> None:
    with runs.waiting("+cluster.sbatch.no-requeue=true", nodes=1) as (run, exit_code):
        run.until_step(3)
        run.preempt()
        run.until_attempt(2)
        run.set_pace(0)
        assert exit_code() == 0
    first, second = run.attempts
    assert run.reasons == ["preempted", "completed"]
    assert_nothing_was_lost(run)
    assert (first.job_id, second.job_id) == (run.job_id, run.newest_job)
    assert run.job_id != run.newest_job
    assert first.next == "resubmit"
    assert run.digest == runs.straight(processes=1)


@pytest.mark.nightly  # the gate has a cancelled run in test_commands.py
def test_cancelled(runs: SubmittedRuns) -> None:
    with runs.waiting(nodes=1) as (run, exit_code):
        run.until_step(3)
        run.sandbox.ask("scancel", run.job_id)
        assert exit_code() == 3
    assert run.until_ended() == "CANCELLED"
    ((_, _, step),) = run.story
    assert run.story == [(0, "cancelled", step)]
    assert run.directory.checkpoint_steps() == [step]
    assert run.sandbox.job(run.job_id)["Restarts"] == "0"


@pytest.mark.nightly  # the gate has it in tests/unit/supervise
def test_a_signal_that_slurm_does_not_explain_gets_new_ranks_in_the_same_job(runs: SubmittedRuns) -> None:
    """As by a message that slurmctld sends again after a requeue, to the step of the same number."""
    run = runs.train(nodes=1)
    run.until_step(3)
    run.sandbox.ask("scancel", "--signal=TERM", f"{run.job_id}.0")
    run.until_attempt(2)
    run.set_pace(0)
    assert run.until_ended() == "COMPLETED"
    (_, _, stopped), _ = run.story
    assert run.story == [(0, "interrupted", stopped), (stopped, "completed", STEPS)]
    assert run.attempts[0].next == "restart"
    assert run.sandbox.job(run.job_id)["Restarts"] == "0"
    assert run.digest == runs.straight(processes=1)


@pytest.mark.nightly
def test_a_script_that_its_user_wrote(runs: SubmittedRuns) -> None:
    """slurm/train.sbatch: its user's script executes the supervisor."""
    run = runs.by_hand("--nodes=2")
    assert preempt_once(run) == "COMPLETED"
    (_, _, stopped), _ = run.story
    assert run.story == [(0, "preempted", stopped), (stopped, "completed", STEPS)]
    assert {one.job_id for one in run.attempts} == {run.job_id}
    assert run.digest == runs.straight()

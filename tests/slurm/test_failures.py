"""Nodes and ranks that die, hang or lose their network or disk on a real SLURM: the run ends as a straight one does."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hpctrain.files import TEMPORARY_PREFIX, read_json_lines
from hpctrain.run.exit_record import read_exit_records
from hpctrain.run.ledger import Ledger
from tests.slurm.programs.disk import Disk
from tests.slurm.programs.followed_run import FollowedRun
from tests.slurm.programs.submitted_runs import STEPS, SubmittedRuns

OFTEN = "checkpoint.every_steps=10"
SHORT_TIMEOUTS = ("health.hang_timeout_s=8", "health.eval_timeout_s=8", "health.save_timeout_s=8")
QUICKLY_DOWN = "--node-timeout=10"
WORKERS = "data.num_workers=1"
PACE_S = 0.2
"""Of a step, where a test waits for more than ten of them."""


def let_it_end(run: FollowedRun, attempt: int) -> str:
    """Let a run finish quickly once this attempt has begun; returns the job's last JobState."""
    run.until_attempt(attempt)
    run.set_pace(0)
    return run.until_ended()


def until_saved(run: FollowedRun) -> None:
    """Wait until step 13 is over and the checkpoint of step 10 is there."""
    run.until_step(13)
    run.until(run.directory.checkpoint_steps, "a checkpoint")


def assert_survived(
    runs: SubmittedRuns, run: FollowedRun, *reasons: str, processes: int = 2, words: tuple[str, ...] = ()
) -> None:
    """One attempt ended for each reason, and the last one ended as a straight run does."""
    assert run.reasons == [*reasons, "completed"], run
    for before, after in zip(run.attempts, run.attempts[1:], strict=False):
        assert after.start_step == before.saved_step, run
    if "node_failure" in reasons:
        assert run.attempts[0].saved_step > 0, run
    assert run.story[-1][2] == STEPS
    assert run.digest == runs.straight(*words, processes=processes)
    logged = [record["step"] for record in read_json_lines(run.directory.metrics)]
    assert logged == list(range(1, STEPS + 1)), "each step is logged once"


def unfinished(run: FollowedRun) -> list[Path]:
    return list(run.directory.checkpoints.glob(f"{TEMPORARY_PREFIX}*"))


@pytest.mark.nightly
@pytest.mark.sandbox(QUICKLY_DOWN)
def test_the_batch_host_dies_in_the_middle_of_training(runs: SubmittedRuns) -> None:
    run = runs.train(OFTEN, WORKERS, pace_s=PACE_S, nodes=1)
    until_saved(run)
    runs.sandbox.kill_node("n1")
    assert let_it_end(run, 2) == "COMPLETED"
    assert_survived(runs, run, "node_failure", processes=1)
    first, second = run.attempts
    assert (first.start_step, first.requeued_by, first.job_id) == (0, "slurm", second.job_id)
    assert (first.nodes, second.nodes) == (("n1",), ("n2",))
    runs.sandbox.revive_node("n1")


@pytest.mark.nightly
@pytest.mark.sandbox(QUICKLY_DOWN)
def test_a_node_dies_in_the_middle_of_a_save(runs: SubmittedRuns) -> None:
    takes_time = "+task.ballast_mb=80"
    run = runs.train(OFTEN, takes_time, pace_s=PACE_S)
    run.until_step(5)
    rank_zero, half = run.rank(0), []
    while not half:
        run.until(lambda: run.directory.checkpoint_steps() and unfinished(run), "another save")
        os.kill(rank_zero, signal.SIGSTOP)
        half = unfinished(run)
        if not half:
            os.kill(rank_zero, signal.SIGCONT)
    runs.sandbox.kill_node("n1")
    assert let_it_end(run, 2) == "COMPLETED"
    assert_survived(runs, run, "node_failure", words=(takes_time,))
    assert not unfinished(run), "the next attempt clears up"
    runs.sandbox.revive_node("n1")


@pytest.mark.nightly  # the gate has a dead node in test_fewer_nodes.py, spare ones in tests/unit/supervise
@pytest.mark.sandbox(QUICKLY_DOWN)
def test_a_spare_node_takes_the_place_of_one_that_died(runs: SubmittedRuns) -> None:
    run = runs.train(OFTEN, "cluster.spare_nodes=1", "cluster.memory_gb=4", pace_s=PACE_S)
    until_saved(run)
    runs.sandbox.kill_node("n2")
    assert let_it_end(run, 2) == "COMPLETED"
    assert_survived(runs, run, "node_failure")
    first, second = run.attempts
    assert (first.nodes, second.nodes) == (("n1", "n2"), ("n1", "n3"))
    assert first.next == "restart"
    assert runs.sandbox.job(run.job_id)["Restarts"] == "0"
    runs.sandbox.revive_node("n2")


@pytest.mark.nightly
@pytest.mark.sandbox(QUICKLY_DOWN)
def test_a_node_is_cut_off(runs: SubmittedRuns) -> None:
    """The rank on it lives on, and waits for the others."""
    run = runs.train(OFTEN, *SHORT_TIMEOUTS, pace_s=PACE_S)
    until_saved(run)
    lost = run.rank(1)
    runs.sandbox.cut("n2")
    run.until_attempt(2)
    runs.sandbox.mend("n2")
    run.until(lambda: lost not in run.processes(), "the end of the rank that was cut off")
    assert let_it_end(run, 2) == "COMPLETED"
    assert_survived(runs, run, "node_failure")
    assert "n2" not in run.attempts[1].nodes


@pytest.mark.nightly
@pytest.mark.sandbox(QUICKLY_DOWN)
def test_the_batch_host_is_cut_off(runs: SubmittedRuns) -> None:
    """The old attempt needs no other node, so it keeps training next to the new one."""
    run = runs.train(OFTEN, pace_s=PACE_S, nodes=1)
    until_saved(run)
    old = set(run.processes())
    runs.sandbox.cut("n1")
    run.until_step(run.step + 1)
    run.set_pace(60)  # it must not save while the second attempt looks for what is saved
    run.until(lambda: Ledger(run.directory).last_claim() == 2, "the second attempt")
    assert old & set(run.ranks()), "it would have been no test"
    run.set_pace(0)
    run.until(lambda: not old & set(run.ranks()), "the end of the old attempt")
    assert f"attempt 1 of {run.directory.path} was superseded" in run.directory.rank_log(0).read_text()
    runs.sandbox.mend("n1")
    # on SLURM 26.05 its srun waits for the controller until then
    run.until(lambda: not old & set(run.processes()), "the end of the old batch script")
    assert run.until_ended() == "COMPLETED"
    assert_survived(runs, run, "node_failure", processes=1)


@pytest.mark.soak
@pytest.mark.sandbox("--node-timeout=60")
def test_a_node_is_cut_off_for_longer_than_the_watchdog_waits(runs: SubmittedRuns) -> None:
    """But not for longer than SLURM waits: the job continues with new ranks."""
    run = runs.train(OFTEN, *SHORT_TIMEOUTS)
    run.until_step(13)
    runs.sandbox.cut("n2")
    run.until(lambda: 0 in read_exit_records(run.directory.attempt(1)), "the hang")
    runs.sandbox.mend("n2")
    assert let_it_end(run, 2) == "COMPLETED"
    assert_survived(runs, run, "hang")
    assert runs.sandbox.job(run.job_id)["Restarts"] == "0"


@pytest.mark.nightly
@pytest.mark.sandbox("--node-timeout=60")
def test_a_node_is_cut_off_for_a_moment(runs: SubmittedRuns) -> None:
    run = runs.train(OFTEN, pace_s=PACE_S)
    run.until_step(13)
    runs.sandbox.cut("n2")
    run.set_pace(0)
    runs.sandbox.mend("n2")
    assert run.until_ended() == "COMPLETED"
    assert_survived(runs, run)


@pytest.mark.parametrize("death", ["SIGKILL", pytest.param("SIGBUS", marks=pytest.mark.nightly)])
def test_a_rank_dies(runs: SubmittedRuns, death: str) -> None:
    run = runs.train(OFTEN, WORKERS, f"+task.act='1:1:15:{death}'", pace_s=0)
    assert run.until_ended() == "COMPLETED"
    assert_survived(runs, run, "infrastructure")
    first, _ = run.attempts
    assert (first.next, first.suspects) == ("restart", ("n2",))
    assert "rank 1 of 2 ended without an exit record" in first.detail
    assert runs.sandbox.job(run.job_id)["Restarts"] == "0"


@pytest.mark.nightly  # the gate has hangs in tests/multiprocess/test_watchdog.py, what follows in tests/unit
def test_a_rank_stands_still(runs: SubmittedRuns) -> None:
    run = runs.train(OFTEN, *SHORT_TIMEOUTS, "+task.act='1:1:15:SIGSTOP'", pace_s=0)
    assert run.until_ended() == "COMPLETED"
    assert_survived(runs, run, "hang")
    first, _ = run.attempts
    assert first.next == "restart"
    assert "rank 1" in first.detail, "the ranks that wait for it name it"
    assert runs.sandbox.job(run.job_id)["Restarts"] == "0"


@pytest.mark.sandbox("--memory-limits")
def test_a_rank_takes_too_much_memory(runs: SubmittedRuns) -> None:
    run = runs.train(OFTEN, "cluster.memory_gb=2", "+task.act='1:0:15:memory'", nodes=1, pace_s=0)
    assert run.until_ended() == "COMPLETED"
    assert_survived(runs, run, "out_of_memory", processes=1)
    assert "killed by the kernel; raise cluster.memory_gb above 2 (GB per node)" in run.attempts[0].detail


@pytest.mark.nightly
def test_the_disk_is_full_and_the_run_is_preempted(runs: SubmittedRuns, disk: Disk) -> None:
    acts = "+task.act='1:0:13:SIGSTOP,1:0:23:SIGSTOP'"
    run = runs.train(OFTEN, "checkpoint.on_error=warn", "checkpoint.asynchronous=false", acts, pace_s=0)
    rank_zero = run.until_stopped(0)
    disk.fill()
    os.kill(rank_zero, signal.SIGCONT)
    run.until_stopped(0)
    assert run.directory.checkpoint_steps() == [10]
    run.set_pace(0.2)  # the ranks agree about once a second: there must be steps left
    run.preempt()
    # it comes with a SIGCONT
    runs.sandbox.wait_requeued(run.job_id)
    run.set_pace(0)
    disk.free()
    assert run.until_ended() == "COMPLETED"
    assert_survived(runs, run, "preempted")


@pytest.mark.nightly  # the gate has failed writes in tests/multiprocess/test_saves.py
def test_the_disk_is_full_and_a_failed_save_ends_the_run(runs: SubmittedRuns, disk: Disk) -> None:
    words = (OFTEN, "+task.act='1:0:13:SIGSTOP'")
    run = runs.train(*words, pace_s=0, nodes=1)
    rank_zero = run.until_stopped(0)
    disk.fill()
    os.kill(rank_zero, signal.SIGCONT)
    assert run.until_ended() == "FAILED"
    assert run.directory.checkpoint_steps() == [10]
    disk.free()
    runs.submit(run, *words, nodes=1)
    assert run.until_ended() == "COMPLETED"
    assert_survived(runs, run, "failed", processes=1)
    detail = run.attempts[0].detail
    assert "No space left on device" in detail
    assert "0 B are free; no older checkpoint of the run can be removed" in detail


@pytest.mark.nightly
def test_the_disk_is_read_only_for_a_while(runs: SubmittedRuns, disk: Disk) -> None:
    acts = "+task.act='1:0:13:SIGSTOP,1:0:23:SIGSTOP'"
    run = runs.train(OFTEN, "checkpoint.on_error=warn", "checkpoint.asynchronous=false", acts, pace_s=0)
    rank_zero = run.until_stopped(0)
    directory = run.directory
    with disk.read_only((directory.checkpoints, directory.claims, directory.attempts), runs.sandbox):
        os.kill(rank_zero, signal.SIGCONT)
        run.until_stopped(0)
        assert directory.checkpoint_steps() == [10]
    os.kill(rank_zero, signal.SIGCONT)
    assert run.until_ended() == "COMPLETED"
    assert_survived(runs, run)
    assert "Read-only file system" in directory.rank_log(0).read_text()


@pytest.mark.nightly
def test_a_rank_dies_while_the_disk_is_read_only(runs: SubmittedRuns, disk: Disk) -> None:
    run = runs.train(OFTEN, "+task.act='1:0:13:SIGSTOP'", pace_s=0)
    rank_zero = run.until_stopped(0)
    directory = run.directory
    with disk.read_only((directory.checkpoints, directory.claims, directory.attempts), runs.sandbox):
        os.kill(rank_zero, signal.SIGKILL)
        run.until(lambda: "the end of attempt 1 can't be recorded" in run.batch_log, "the refusal")
    assert run.until_ended() == "COMPLETED"
    assert_survived(runs, run, "infrastructure")
    assert runs.sandbox.job(run.job_id)["Restarts"] == "0"


@pytest.mark.nightly
def test_a_node_that_fails_again_is_left_out(runs: SubmittedRuns) -> None:
    run = runs.train(OFTEN, "+task.act='1:1:15:SIGKILL,2:1:15:SIGKILL'", pace_s=0)
    assert run.until_ended() == "COMPLETED"
    assert_survived(runs, run, "infrastructure", "infrastructure")
    first, second, third = run.attempts
    assert (first.next, second.next) == ("restart", "resubmit")
    assert second.exclude == ("n2",)
    assert first.nodes == second.nodes == ("n1", "n2")
    assert "n2" not in third.nodes
    assert (second.job_id, third.job_id) == (run.job_id, run.newest_job)
    assert third.job_id != second.job_id


@pytest.mark.soak
def test_more_failures_than_allowed(runs: SubmittedRuns) -> None:
    acts = "+task.act='1:1:15:SIGKILL,2:0:15:SIGKILL'"
    with runs.waiting(OFTEN, "cluster.requeue.max_failures=1", acts, pace_s=0) as (run, exit_code):
        assert exit_code() == 1
    assert run.until_ended() == "FAILED"
    assert [(start, reason) for start, reason, _ in run.story] == [(0, "infrastructure"), (10, "infrastructure")]
    assert "cluster.requeue.max_failures=1 allows no more" in run.batch_log


@pytest.mark.nightly
def test_failures_that_move_no_step_forward(runs: SubmittedRuns) -> None:
    run = runs.train(OFTEN, "+task.act='*:1:5:SIGKILL'", pace_s=0)
    assert run.until_ended() == "FAILED"
    assert [(start, reason) for start, reason, _ in run.story] == [(0, "infrastructure"), (0, "stalled")]
    assert "2 attempts in a row gained no step" in run.attempts[1].detail


@pytest.mark.nightly
def test_an_error_of_the_task_s_own_at_the_same_step_each_time(runs: SubmittedRuns) -> None:
    with runs.waiting(OFTEN, "+task.act='*:1:7:raise'", pace_s=0) as (run, exit_code):
        assert exit_code() == 1
    assert run.until_ended() == "FAILED"
    assert run.story == [(0, "failed", 6)]
    assert "rank 1 on n2, after step " in run.attempts[0].detail
    assert runs.sandbox.job(run.job_id)["Restarts"] == "0"


@pytest.mark.nightly  # the gate has early requeues in tests/unit/supervise
def test_exit_code_zero_in_the_grace_time_does_not_end_the_run(runs: SubmittedRuns) -> None:
    """The ranks' own code exits with 0 at SIGTERM, so SLURM would call the job completed."""
    run = runs.train(OFTEN, "+task.act='1:0:1:polite'", pace_s=PACE_S, nodes=1)
    run.until_step(13)
    run.preempt()
    assert let_it_end(run, 2) == "COMPLETED"
    assert_survived(runs, run, "preempted", processes=1)
    assert {one.job_id for one in run.attempts} == {run.job_id}


def test_the_supervisor_is_killed(runs: SubmittedRuns) -> None:
    """Its ranks live on until the next supervisor stops them, and other steps of the job stay."""
    # the step of the user's own finds room without the ranks' cores and memory
    server = "srun --overlap --nodes=1 --ntasks=1 --mem=0 --job-name=server sleep 600 &"
    run = runs.train(OFTEN, f"cluster.setup=['{server}']", "name=digits", nodes=1, pace_s=PACE_S)
    run.until_step(5)
    assert b"SLURM_JOB_NAME=digits\0" in Path(f"/proc/{run.rank(0)}/environ").read_bytes()
    supervisor = run.supervisor
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    run.until_attempt(2)
    steps = runs.sandbox.ask("squeue", "--steps", "--noheader", "--format=%j", f"--jobs={run.job_id}").split()
    assert steps.count("server") == 1
    assert let_it_end(run, 2) == "COMPLETED"
    assert_survived(runs, run, "interrupted", processes=1)
    assert runs.sandbox.job(run.job_id)["Restarts"] == "0"
    assert {one.job_id for one in run.attempts} == {run.job_id}

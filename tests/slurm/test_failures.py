"""Dead nodes, cut cables, dead and hanging ranks, full disks on a real SLURM: the run ends as if nothing had been."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from performance import perform, staged
from stage import STEPS, Stage
from trial import Trial

from hpctrain.files import TEMPORARY_PREFIX, read_json_lines
from hpctrain.run.exit_record import read_exit_records
from hpctrain.run.ledger import Ledger

if TYPE_CHECKING:
    from conftest import SlurmSandbox

OFTEN = "checkpoint.every_steps=10"
IMPATIENT = ("health.hang_timeout_s=8", "health.eval_timeout_s=8", "health.save_timeout_s=8")
QUICKLY_DOWN = "--node-timeout=10"
WORKERS = "data.num_workers=1"
PACE_S = 0.2
"""Of a step, where a test waits for more than ten of them."""


@pytest.fixture(scope="module")
def performances(
    request: pytest.FixtureRequest, sandbox: SlurmSandbox, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[None]]]:
    yield from perform(request, sandbox, tmp_path_factory.mktemp("failures"))


def let_it_end(trial: Trial, attempt: int) -> str:
    """From this attempt on nothing slows it down; returns SLURM's word for its end."""
    trial.until_attempt(attempt)
    trial.set_pace(0)
    return trial.until_ended()


def until_saved(trial: Trial) -> None:
    """Train past step 13, until what it saved after ten steps is there."""
    trial.until_step(13)
    trial.until(trial.directory.checkpoint_steps, "a checkpoint")


def assert_survived(stage: Stage, trial: Trial, *reasons: str, processes: int = 2, words: tuple[str, ...] = ()) -> None:
    """One attempt for each reason, then the end that a straight run has, by way of a single job."""
    assert trial.reasons == [*reasons, "completed"], trial
    for before, after in zip(trial.attempts, trial.attempts[1:], strict=False):
        assert after.start_step == before.extra["saved_step"], trial
    if "node_failure" in reasons:
        assert trial.attempts[0].extra["saved_step"] > 0, trial
    assert trial.story[-1][2] == STEPS
    assert trial.digest == stage.straight(*words, processes=processes)
    logged = [record["step"] for record in read_json_lines(trial.directory.metrics)]
    assert logged == list(range(1, STEPS + 1)), "each step is logged once"


def unfinished(trial: Trial) -> list[Path]:
    return list(trial.directory.checkpoints.glob(f"{TEMPORARY_PREFIX}*"))


@staged("--nodes=3", QUICKLY_DOWN)
def test_the_batch_host_dies_in_the_middle_of_training(stage: Stage) -> None:
    trial = stage.train(OFTEN, WORKERS, pace_s=PACE_S)
    until_saved(trial)
    stage.sandbox.kill_node("n1")
    assert let_it_end(trial, 2) == "COMPLETED"
    assert_survived(stage, trial, "node_failure")
    first, second = trial.attempts
    assert (first.start_step, first.extra["requeued_by"], first.job_id) == (0, "slurm", second.job_id)
    assert (first.nodes, second.nodes) == (("n1", "n2"), ("n2", "n3"))
    stage.sandbox.revive_node("n1")


@staged("--nodes=3", QUICKLY_DOWN)
def test_a_node_dies_in_the_middle_of_a_save(stage: Stage) -> None:
    takes_time = "+task.ballast_mb=80"
    trial = stage.train(OFTEN, takes_time, pace_s=PACE_S)
    trial.until_step(5)
    rank_zero, half = trial.rank(0), []
    while not half:
        trial.until(lambda: trial.directory.checkpoint_steps() and unfinished(trial), "another save")
        os.kill(rank_zero, signal.SIGSTOP)
        half = unfinished(trial)
        if not half:
            os.kill(rank_zero, signal.SIGCONT)
    stage.sandbox.kill_node("n1")
    assert let_it_end(trial, 2) == "COMPLETED"
    assert_survived(stage, trial, "node_failure", words=(takes_time,))
    assert not unfinished(trial), "the next attempt clears up"
    stage.sandbox.revive_node("n1")


@staged("--nodes=3", QUICKLY_DOWN)
def test_a_spare_node_takes_the_place_of_one_that_died(stage: Stage) -> None:
    trial = stage.train(OFTEN, "cluster.spare_nodes=1", "cluster.memory_gb=4", pace_s=PACE_S)
    until_saved(trial)
    stage.sandbox.kill_node("n2")
    assert let_it_end(trial, 2) == "COMPLETED"
    assert_survived(stage, trial, "node_failure")
    first, second = trial.attempts
    assert (first.nodes, second.nodes) == (("n1", "n2"), ("n1", "n3"))
    assert first.extra["next"] == "restart"
    assert stage.sandbox.job(trial.job_id)["Restarts"] == "0"
    stage.sandbox.revive_node("n2")


@staged("--nodes=3", QUICKLY_DOWN)
def test_a_node_is_cut_off(stage: Stage) -> None:
    """The rank on it lives on, and waits for the others."""
    trial = stage.train(OFTEN, *IMPATIENT, pace_s=PACE_S)
    until_saved(trial)
    lost = trial.rank(1)
    stage.sandbox.cut("n2")
    trial.until_attempt(2)
    stage.sandbox.mend("n2")
    trial.until(lambda: lost not in trial.processes(), "the end of the rank that was cut off")
    assert let_it_end(trial, 2) == "COMPLETED"
    assert_survived(stage, trial, "node_failure")
    assert trial.attempts[1].nodes == ("n1", "n3")


@staged("--nodes=2", QUICKLY_DOWN)
def test_the_batch_host_is_cut_off(stage: Stage) -> None:
    """The old attempt needs nobody on another node, so it trains on, beside the new one."""
    trial = stage.train(OFTEN, pace_s=PACE_S, nodes=1)
    until_saved(trial)
    old = set(trial.processes())
    stage.sandbox.cut("n1")
    trial.until_step(trial.step + 1)
    trial.set_pace(60)  # it must not save while the second attempt looks for what is saved
    trial.until(lambda: Ledger(trial.directory).last_claim() == 2, "the second attempt")
    assert old & set(trial.ranks()), "it would have been no test"
    trial.set_pace(0)
    trial.until(lambda: not old & set(trial.processes()), "the end of the old attempt")
    assert "attempt 1 was superseded" in trial.batch_log
    stage.sandbox.mend("n1")
    assert trial.until_ended() == "COMPLETED"
    assert_survived(stage, trial, "node_failure", processes=1)


@pytest.mark.soak
@staged("--nodes=2", "--node-timeout=60")
def test_a_node_is_cut_off_for_longer_than_the_watchdog_waits(stage: Stage) -> None:
    """And for less than SLURM does: the job goes on, with new ranks."""
    trial = stage.train(OFTEN, *IMPATIENT)
    trial.until_step(13)
    stage.sandbox.cut("n2")
    trial.until(lambda: 0 in read_exit_records(trial.directory.claim(1)), "the hang")
    stage.sandbox.mend("n2")
    assert let_it_end(trial, 2) == "COMPLETED"
    assert_survived(stage, trial, "hang")
    assert stage.sandbox.job(trial.job_id)["Restarts"] == "0"


@staged("--nodes=2", "--node-timeout=60")
def test_a_node_is_cut_off_for_a_moment(stage: Stage) -> None:
    trial = stage.train(OFTEN, pace_s=PACE_S)
    trial.until_step(13)
    stage.sandbox.cut("n2")
    trial.set_pace(0)
    stage.sandbox.mend("n2")
    assert trial.until_ended() == "COMPLETED"
    assert_survived(stage, trial)


@pytest.mark.parametrize("death", ["SIGKILL", "SIGBUS"])
@staged("--nodes=2")
def test_a_rank_dies(stage: Stage, death: str) -> None:
    trial = stage.train(OFTEN, WORKERS, f"+task.act='1:1:15:{death}'", pace_s=0)
    assert trial.until_ended() == "COMPLETED"
    assert_survived(stage, trial, "infrastructure")
    first, _ = trial.attempts
    assert (first.extra["next"], first.extra["suspects"]) == ("restart", ["n2"])
    assert "rank 1 of 2 ended without an exit record" in first.detail
    assert stage.sandbox.job(trial.job_id)["Restarts"] == "0"


@staged("--nodes=2")
def test_a_rank_stands_still(stage: Stage) -> None:
    trial = stage.train(OFTEN, *IMPATIENT, "+task.act='1:1:15:SIGSTOP'", pace_s=0)
    assert trial.until_ended() == "COMPLETED"
    assert_survived(stage, trial, "hang")
    first, _ = trial.attempts
    assert first.extra["next"] == "restart"
    assert "rank 1" in first.detail, "whoever waits for it says whom it may be"
    assert stage.sandbox.job(trial.job_id)["Restarts"] == "0"


@staged("--nodes=1", "--memory-limits")
def test_a_rank_takes_too_much_memory(stage: Stage) -> None:
    trial = stage.train(OFTEN, "cluster.memory_gb=2", "+task.act='1:0:15:memory'", nodes=1, pace_s=0)
    assert trial.until_ended() == "COMPLETED"
    assert_survived(stage, trial, "out_of_memory", processes=1)


@staged("--nodes=2", disk=True)
def test_the_disk_is_full_and_the_run_is_preempted(stage: Stage) -> None:
    acts = "+task.act='1:0:13:SIGSTOP,1:0:23:SIGSTOP'"
    trial = stage.train(OFTEN, "checkpoint.on_error=warn", "checkpoint.asynchronous=false", acts, pace_s=0)
    rank_zero = trial.until_stopped(0)
    stage.disk.fill()
    os.kill(rank_zero, signal.SIGCONT)
    trial.until_stopped(0)
    assert trial.directory.checkpoint_steps() == [10]
    trial.set_pace(0.2)  # the ranks agree about once a second: there must be steps left
    trial.preempt()
    # it comes with a SIGCONT
    stage.sandbox.wait_requeued(trial.job_id)
    trial.set_pace(0)
    stage.disk.free()
    assert trial.until_ended() == "COMPLETED"
    assert_survived(stage, trial, "preempted")


@staged("--nodes=2", disk=True)
def test_the_disk_is_full_and_a_failed_save_ends_the_run(stage: Stage) -> None:
    words = (OFTEN, "+task.act='1:0:13:SIGSTOP'")
    trial = stage.train(*words, pace_s=0)
    rank_zero = trial.until_stopped(0)
    stage.disk.fill()
    os.kill(rank_zero, signal.SIGCONT)
    assert trial.until_ended() == "FAILED"
    assert trial.directory.checkpoint_steps() == [10]
    stage.disk.free()
    stage.submit(trial, *words)
    assert trial.until_ended() == "COMPLETED"
    assert_survived(stage, trial, "failed")
    assert "No space left on device" in trial.attempts[0].detail


@staged("--nodes=2", disk=True)
def test_the_disk_is_read_only_for_a_while(stage: Stage) -> None:
    acts = "+task.act='1:0:13:SIGSTOP,1:0:23:SIGSTOP'"
    trial = stage.train(OFTEN, "checkpoint.on_error=warn", "checkpoint.asynchronous=false", acts, pace_s=0)
    rank_zero = trial.until_stopped(0)
    run = trial.directory
    with stage.disk.read_only((run.checkpoints, run.claims, run.attempts), stage.sandbox):
        os.kill(rank_zero, signal.SIGCONT)
        trial.until_stopped(0)
        assert run.checkpoint_steps() == [10]
    os.kill(rank_zero, signal.SIGCONT)
    assert trial.until_ended() == "COMPLETED"
    assert_survived(stage, trial)
    assert "Read-only file system" in run.rank_log(0).read_text()


@staged("--nodes=2", disk=True)
def test_a_rank_dies_while_the_disk_is_read_only(stage: Stage) -> None:
    trial = stage.train(OFTEN, "+task.act='1:0:13:SIGSTOP'", pace_s=0)
    rank_zero = trial.until_stopped(0)
    run = trial.directory
    with stage.disk.read_only((run.checkpoints, run.claims, run.attempts), stage.sandbox):
        os.kill(rank_zero, signal.SIGKILL)
        trial.until(lambda: "the end of attempt 1 can't be recorded" in trial.batch_log, "the refusal")
    assert trial.until_ended() == "COMPLETED"
    assert_survived(stage, trial, "infrastructure")
    assert stage.sandbox.job(trial.job_id)["Restarts"] == "0"


@staged("--nodes=3")
def test_a_node_that_fails_again_is_left_out(stage: Stage) -> None:
    trial = stage.train(OFTEN, "+task.act='1:1:15:SIGKILL,2:1:15:SIGKILL'", pace_s=0)
    assert trial.until_ended() == "COMPLETED"
    assert_survived(stage, trial, "infrastructure", "infrastructure")
    first, second, third = trial.attempts
    assert (first.extra["next"], second.extra["next"]) == ("restart", "resubmit")
    assert second.extra["exclude"] == ["n2"]
    assert (first.nodes, second.nodes, third.nodes) == (("n1", "n2"), ("n1", "n2"), ("n1", "n3"))
    assert (second.job_id, third.job_id) == (trial.job_id, trial.newest_job)
    assert third.job_id != second.job_id


@pytest.mark.soak
@staged("--nodes=2")
def test_more_failures_than_allowed(stage: Stage) -> None:
    acts = "+task.act='1:1:15:SIGKILL,2:0:15:SIGKILL'"
    with stage.waiting(OFTEN, "cluster.requeue.max_failures=1", acts, pace_s=0) as (trial, exit_code):
        assert exit_code() == 1
    assert trial.until_ended() == "FAILED"
    assert [(start, reason) for start, reason, _ in trial.story] == [(0, "infrastructure"), (10, "infrastructure")]
    assert "cluster.requeue.max_failures=1 allows no more" in trial.batch_log


@staged("--nodes=2")
def test_failures_that_move_no_step_forward(stage: Stage) -> None:
    trial = stage.train(OFTEN, "+task.act='*:1:5:SIGKILL'", pace_s=0)
    assert trial.until_ended() == "FAILED"
    assert [(start, reason) for start, reason, _ in trial.story] == [(0, "infrastructure"), (0, "stalled")]
    assert "2 attempts in a row gained no step" in trial.attempts[1].detail


@staged("--nodes=2")
def test_an_error_of_the_task_s_own_at_the_same_step_each_time(stage: Stage) -> None:
    with stage.waiting(OFTEN, "+task.act='*:1:7:raise'", pace_s=0) as (trial, exit_code):
        assert exit_code() == 1
    assert trial.until_ended() == "FAILED"
    assert trial.story == [(0, "failed", 6)]
    assert "rank 1 on n2 failed" in trial.attempts[0].detail
    assert stage.sandbox.job(trial.job_id)["Restarts"] == "0"


@staged("--nodes=2")
def test_exit_code_zero_in_the_grace_time_does_not_end_the_run(stage: Stage) -> None:
    """Ranks whose own code takes SIGTERM for a reason to end well: SLURM would call the job completed."""
    trial = stage.train(OFTEN, "+task.act='1:0:1:polite,1:1:1:polite'", pace_s=PACE_S)
    trial.until_step(13)
    trial.preempt()
    assert let_it_end(trial, 2) == "COMPLETED"
    assert_survived(stage, trial, "preempted")
    assert {one.job_id for one in trial.attempts} == {trial.job_id}

"""Preempted, near the time limit, cancelled: a real SLURM stops runs, and each goes on, or ends, as it should."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

import pytest
from performance import perform, staged
from stage import STEPS, Stage
from trial import Trial

if TYPE_CHECKING:
    from conftest import SlurmSandbox


@pytest.fixture(scope="module")
def performances(
    request: pytest.FixtureRequest, sandbox: SlurmSandbox, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[None]]]:
    yield from perform(request, sandbox, tmp_path_factory.mktemp("preemption"))


def assert_nothing_was_lost(trial: Trial) -> None:
    """Each attempt began where the one before had stopped."""
    begun = [one.start_step for one in trial.attempts]
    assert begun == [0, *(one.end_step for one in trial.attempts[:-1])], trial
    assert all(begun[1:]), trial


def preempt_once(trial: Trial) -> str:
    """Returns SLURM's word for the end."""
    trial.until_step(3)
    trial.preempt()
    trial.until_attempt(2)
    trial.set_pace(0)
    return trial.until_ended()


def preempt_twice(stage: Stage, trial: Trial) -> None:
    trial.until_step(3)
    trial.preempt()
    trial.until_attempt(2)
    trial.until_step((trial.attempts[1].start_step or 0) + 3)
    trial.preempt()
    trial.until_attempt(3)
    trial.set_pace(0)


ALONE = "--nodes=1"
WITHOUT_GRACE = [(ALONE, "--grace-time=0"), (ALONE, "--grace-time=0", "--preempt-mode=CANCEL")]
"""What SLURM does is the same for one rank, which starts in half the time of two."""


@pytest.mark.parametrize(
    "options", [("--nodes=2",), (ALONE, "--preempt-send-user-signal"), (ALONE, "--preempt-mode=CANCEL")], ids=" ".join
)
@staged()
def test_preempted_twice(stage: Stage, options: tuple[str, ...]) -> None:
    nodes = 1 if ALONE in options else 2
    trial = stage.train(nodes=nodes)
    preempt_twice(stage, trial)
    assert trial.until_ended() == "COMPLETED"
    (_, _, first), (_, _, second), _ = trial.story
    assert trial.story == [(0, "preempted", first), (first, "preempted", second), (second, "completed", STEPS)]
    assert {one.job_id for one in trial.attempts} == {trial.job_id}
    assert trial.digest == stage.straight(processes=nodes)


@pytest.mark.parametrize("options", WITHOUT_GRACE, ids=" ".join)
@staged()
def test_preempted_without_grace_time(stage: Stage, options: tuple[str, ...]) -> None:
    """A step that takes longer than SLURM waits: the interval between checkpoints is what can be lost."""
    trial = stage.train("checkpoint.every_steps=10", pace_s=0.1, nodes=1)
    trial.until_step(13)
    trial.set_pace(60)
    trial.until_step(14)
    trial.preempt()
    trial.until(lambda: not trial.ranks(), "SIGKILL")
    trial.set_pace(0)
    assert trial.until_ended() == "COMPLETED"
    assert [(start, reason) for start, reason, _ in trial.story] == [(0, "preempted"), (10, "completed")]
    assert trial.attempts[0].job_id == trial.attempts[1].job_id
    assert trial.digest == stage.straight(processes=1)


@pytest.mark.parametrize("options", WITHOUT_GRACE, ids=" ".join)
@staged()
def test_without_grace_time_killwait_is_enough_for_a_small_save(stage: Stage, options: tuple[str, ...]) -> None:
    trial = stage.train(nodes=1)
    assert preempt_once(trial) == "COMPLETED"
    (_, _, stopped), _ = trial.story
    assert trial.story == [(0, "preempted", stopped), (stopped, "completed", STEPS)]
    assert trial.digest == stage.straight(processes=1)


@staged(ALONE, "--signal-children")
def test_a_child_process_that_the_signal_ends_fails_no_run(stage: Stage) -> None:
    """A compiler, say, knows nothing of stopping in good order."""
    trial = stage.train("+task.act=1:0:5:child", "checkpoint.every_steps=2", nodes=1)
    trial.until_step(4)
    trial.preempt()
    trial.until_attempt(2)
    trial.set_pace(0)
    assert trial.until_ended() == "COMPLETED"
    assert trial.story == [(0, "preempted", 4), (4, "completed", STEPS)]
    assert "CalledProcessError" in trial.attempts[0].detail
    assert trial.digest == stage.straight(processes=1)


@staged("--nodes=2")
def test_four_ranks(stage: Stage) -> None:
    """Beyond two ranks DDP's first backward sums in another order than all later ones."""
    trial = stage.train("cluster.processes_per_node=2")
    assert preempt_once(trial) == "COMPLETED"
    assert trial.reasons == ["preempted", "completed"]
    assert_nothing_was_lost(trial)
    assert trial.digest == stage.straight(processes=4)


@pytest.mark.soak
@staged()
def test_four_nodes_of_two_ranks_preempted_twice(stage: Stage) -> None:
    trial = stage.train("cluster.processes_per_node=2", nodes=4)
    preempt_twice(stage, trial)
    assert trial.until_ended() == "COMPLETED"
    assert trial.reasons == ["preempted", "preempted", "completed"]
    assert_nothing_was_lost(trial)
    assert trial.digest == stage.straight(processes=8)


@staged(ALONE)
def test_near_the_time_limit(stage: Stage) -> None:
    """On a busy machine an attempt may hardly have begun when SLURM says that its time is over."""
    # SLURM looks every 30 s: the signal comes 15 to 45 s after the job's start
    words = ("cluster.time_limit_min=1", "cluster.signal_delay_s=15", "cluster.requeue.max_stalled_attempts=9")
    trial = stage.train(*words, pace_s=1, nodes=1)
    trial.until_attempt(2)
    trial.set_pace(0)
    assert trial.until_ended() == "COMPLETED"
    *stopped, last = trial.attempts
    assert trial.reasons == ["time_limit"] * len(stopped) + ["completed"]
    assert [one.end_step for one in stopped] == [one.start_step for one in trial.attempts[1:]]
    assert last.end_step == STEPS
    assert {one.job_id for one in trial.attempts} == {trial.job_id}
    assert trial.digest == stage.straight(processes=1)


@staged("--nodes=2")
def test_only_the_preempted_task_of_an_array_runs_again(stage: Stage) -> None:
    """`scontrol requeue` of an array's own id would run the completed tasks again."""
    quick, slow = stage.sweep(2)
    slow.set_pace(1)  # it must not end before the other one
    quick.set_pace(0)
    quick.until_ended()
    assert preempt_once(slow) == "COMPLETED"
    assert slow.reasons == ["preempted", "completed"]
    assert_nothing_was_lost(slow)
    assert {one.job_id for one in slow.attempts} == {slow.job_id}
    assert slow.digest == stage.straight(processes=1)
    assert quick.story == [(0, "completed", STEPS)]
    assert stage.sandbox.job(quick.job_id)["Restarts"] == "0"


@staged(ALONE)
def test_where_the_job_can_t_be_requeued_a_new_one_goes_on(stage: Stage) -> None:
    with stage.waiting("+cluster.sbatch.no-requeue=true", nodes=1) as (trial, exit_code):
        trial.until_step(3)
        trial.preempt()
        trial.until_attempt(2)
        trial.set_pace(0)
        assert exit_code() == 0
    first, second = trial.attempts
    assert trial.reasons == ["preempted", "completed"]
    assert_nothing_was_lost(trial)
    assert (first.job_id, second.job_id) == (trial.job_id, trial.newest_job)
    assert trial.job_id != trial.newest_job
    assert first.extra["next"] == "resubmit"
    assert trial.digest == stage.straight(processes=1)


@staged("--nodes=2")
def test_cancelled(stage: Stage) -> None:
    with stage.waiting() as (trial, exit_code):
        trial.until_step(3)
        trial.sandbox.ask("scancel", trial.job_id)
        assert exit_code() == 3
    assert trial.until_ended() == "CANCELLED"
    ((_, _, step),) = trial.story
    assert trial.story == [(0, "cancelled", step)]
    assert trial.directory.checkpoint_steps() == [step]
    assert trial.sandbox.job(trial.job_id)["Restarts"] == "0"


@staged("--nodes=2")
def test_a_script_that_its_user_wrote(stage: Stage) -> None:
    """slurm/train.sbatch: its user's script executes the supervisor."""
    trial = stage.by_hand("--nodes=2")
    assert preempt_once(trial) == "COMPLETED"
    (_, _, stopped), _ = trial.story
    assert trial.story == [(0, "preempted", stopped), (stopped, "completed", STEPS)]
    assert {one.job_id for one in trial.attempts} == {trial.job_id}
    assert trial.digest == stage.straight()

"""The requeue of the job, early or after its ranks, with a fake SLURM."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from hpctrain.attempt.termination import Termination
from hpctrain.errors import ExitCode
from hpctrain.run.job_records import JobRecords
from hpctrain.run.ledger import EndFacts
from hpctrain.run.reason import Reason
from tests.unit.supervising import (
    ABORTED,
    COMPLETES,
    KILLED,
    RUNNING,
    STOPS,
    ends,
    in_a_thread,
    send_sigterm,
    story,
    until,
)


def test_an_array_task_requeues_itself_alone(slurm, supervisor):
    slurm.plan(ends("preempted", 14, saves=()))
    supervisor(SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="2").run()
    assert slurm.requeued == ["5_2"]


def test_where_the_requeue_is_refused_a_new_job_goes_on(slurm, supervisor):
    slurm.plan(ends("preempted", 14))
    slurm.refuse_requeues()
    one = supervisor()
    assert one.run() == ExitCode.INTERRUPTED
    assert "--job-name" in slurm.submitted
    assert JobRecords(one.directory).read()[-1]["job_id"] == "8"


def test_a_job_that_slurm_has_requeued_already_is_not_submitted_again(slurm, supervisor):
    slurm.plan(ends("preempted", 14, saves=(), job=STOPS["preempted_without_grace"]))
    slurm.refuse_requeues()
    assert supervisor().run() == ExitCode.INTERRUPTED
    assert not slurm.submitted


@pytest.fixture
def preempted(slurm, supervisor):
    """Begins the second attempt of a job that was preempted, as a new process of the batch script."""
    slurm.plan(ends("preempted", 14))
    assert supervisor().run() == ExitCode.INTERRUPTED

    def again(step, **options):
        slurm.plan(step, first=2)
        return supervisor(SLURM_RESTART_COUNT="1", **options)

    return again


NO_REQUEUE = ["JobId=7 Requeue=0"]


ENDS = pytest.mark.parametrize(
    ("step", "code"), [(COMPLETES, ExitCode.FINISHED), (ends("failed", 20), ExitCode.FAILED)]
)


@ENDS
def test_a_job_that_was_preempted_does_not_come_back_after_the_end_of_its_run(slurm, preempted, step, code):
    """SLURM 24.05 would requeue it."""
    assert preempted(replace(step, start=14)).run() == code
    assert slurm.updated == NO_REQUEUE


def test_a_job_that_was_preempted_does_not_come_back_beside_the_one_that_continues_its_run(slurm, preempted):
    slurm.refuse_requeues()
    assert preempted(ends("preempted", 30, start=14)).run() == ExitCode.INTERRUPTED
    assert slurm.submitted
    assert slurm.updated == NO_REQUEUE


def test_a_run_that_completes_in_the_grace_time_leaves_no_job_in_the_queue(slurm, supervisor):
    slurm.plan(replace(COMPLETES, job=STOPS["preempted"]))
    assert supervisor().run() == ExitCode.FINISHED
    assert slurm.updated == NO_REQUEUE


def test_a_run_that_failed_is_not_started_again_by_slurm(slurm, supervisor):
    """As RequeueExit in slurm.conf, or --requeue=expedite of SLURM 25.11, would have it."""
    slurm.plan(ends("failed", 20))
    assert supervisor().run() == ExitCode.FAILED
    assert slurm.updated == NO_REQUEUE


@pytest.mark.parametrize("silent", [False, True])
def test_where_slurm_can_t_be_told_the_log_says_that_the_job_may_start_once_more(slurm, preempted, caplog, silent):
    slurm.refuse_updates()
    one = preempted(replace(COMPLETES, start=14))
    if silent:
        slurm.fall_silent("scontrol")
    assert one.run() == ExitCode.FINISHED
    assert "SLURM may start job 7 once more" in caplog.text
    assert "if it does: scancel 7" in caplog.text


def test_a_job_whose_run_another_one_has_claimed_does_not_come_back(slurm, preempted):
    one = preempted(ends("preempted", 20, saves=(), waits=True, start=14))
    code = in_a_thread(one.run)
    until(lambda: one.ledger.last_claim() == 2)
    one.ledger.start(one.ledger.claim(), job_id="8", nodes=["n3"], world_size=2, step=14)
    slurm.let_ranks_end()
    assert code() == ExitCode.INTERRUPTED
    assert slurm.updated == NO_REQUEUE


def test_a_job_that_trains_other_runs_as_well_may_come_back(slurm, preempted):
    assert preempted(replace(COMPLETES, start=14), shares_job=True).run() == ExitCode.FINISHED
    assert slurm.updated == []


def test_a_cancelled_job_stays_as_it_is(slurm, preempted):
    """It is ending already, and SLURM would refuse."""
    cancelled = ends("cancelled", 20, saves=(), start=14, job=STOPS["cancelled"])
    assert preempted(cancelled).run() == ExitCode.CANCELLED
    assert slurm.updated == []


@pytest.mark.parametrize("silent", [False, True])
def test_a_job_that_was_never_preempted_stays_as_it_is(slurm, supervisor, caplog, silent):
    slurm.plan(COMPLETES)
    one = supervisor()
    if silent:
        slurm.fall_silent("scontrol")
    assert one.run() == ExitCode.FINISHED
    assert slurm.updated == []
    assert "once more" not in caplog.text


@pytest.mark.parametrize(("stop", "silent"), [("preempted_cancel_without_grace", 0), ("time_limit_over", 1)])
def test_a_job_that_is_being_killed_is_requeued_before_its_ranks_are_gone(slurm, supervisor, stop, silent):
    slurm.plan(ends("preempted", 14, waits=True))
    slurm.job(STOPS[stop])
    slurm.fall_silent("scontrol", times=silent)
    one = supervisor()
    code = in_a_thread(one.run)
    until(lambda: one.ledger.last_claim() == 1)
    send_sigterm(one)
    until(lambda: slurm.requeued)
    noted = Termination.read(one.directory.attempt(1))
    assert noted is not None
    assert noted.reason.value in stop
    slurm.let_ranks_end()
    assert code() == ExitCode.INTERRUPTED
    assert slurm.requeued == ["7"]  # not a second time
    # what was found before the requeue counts: after it any end looks like a preemption
    assert story(one) == [(0, noted.reason.value, 14, "requeue")]


def test_a_job_that_is_killed_before_its_first_attempt_is_requeued_too(slurm, supervisor):
    """It may not live until the earlier attempts are closed."""
    slurm.plan(ends("preempted", 0, waits=True))
    slurm.job(STOPS["preempted_cancel_without_grace"])
    one = supervisor()
    send_sigterm(one).join(60)
    assert slurm.requeued == ["7"]
    code = in_a_thread(one.run)
    slurm.let_ranks_end()
    assert code() == ExitCode.INTERRUPTED
    assert slurm.requeued == ["7"]


@pytest.mark.parametrize("says", [ABORTED, KILLED.stderr])
def test_a_job_that_srun_sees_end_is_requeued_without_a_sigterm(slurm, supervisor, says):
    """A controller that was killed may have forgotten the step: srun isn't told of the job's end, and sees a rank's."""
    slurm.plan(ends("preempted", 14, warning=says, waits=True))
    slurm.job(STOPS["preempted_cancel_without_grace"])
    one = supervisor()
    code = in_a_thread(one.run)
    until(lambda: slurm.requeued)
    send_sigterm(one).join(60)
    slurm.let_ranks_end()
    assert code() == ExitCode.INTERRUPTED
    assert slurm.requeued == ["7"]
    assert story(one) == [(0, "preempted", 14, "requeue")]


@pytest.mark.parametrize("early", [False, True])
def test_a_signal_that_ends_the_command_that_asks_is_no_refusal(slurm, supervisor, early):
    """SLURM signals all processes of the batch step, scontrol among them."""
    slurm.kill_next_requeue()
    slurm.plan(ends("preempted", 14, warning=ABORTED if early else "", waits=early))
    slurm.job(STOPS["preempted_cancel_without_grace"])
    one = supervisor()
    code = in_a_thread(one.run)
    until(lambda: slurm.requeued == ["7", "7"])
    slurm.let_ranks_end()
    assert code() == ExitCode.INTERRUPTED
    assert not slurm.submitted


def test_an_early_requeue_that_is_refused_is_asked_for_at_the_next_signal_again(slurm, supervisor):
    slurm.plan(ends("preempted", 14, waits=True))
    slurm.job(STOPS["preempted_cancel_without_grace"])
    slurm.refuse_requeues()
    one = supervisor()
    code = in_a_thread(one.run)
    until(lambda: one.ledger.last_claim() == 1)
    send_sigterm(one).join(60)
    assert slurm.requeued == ["7"]
    slurm.refuse_requeues(False)
    send_sigterm(one).join(60)
    assert slurm.requeued == ["7", "7"]
    slurm.let_ranks_end()
    assert code() == ExitCode.INTERRUPTED
    assert slurm.requeued == ["7", "7"]


def test_a_preempted_job_that_its_user_cancels_is_not_requeued_early(slurm, supervisor):
    """SLURM's record is that of a preemption; what was typed makes the difference."""
    slurm.plan(ends("preempted", 14, waits=True))
    slurm.job(STOPS["preempted_cancel_without_grace"])
    one = supervisor()
    code = in_a_thread(one.run)
    until(lambda: one.ledger.last_claim() == 1)
    JobRecords(one.directory).add({"cancelled": True, "time": time.time()})
    send_sigterm(one).join(60)
    slurm.let_ranks_end()
    assert code() == ExitCode.CANCELLED
    assert not slurm.requeued
    assert Termination.read(one.directory.attempt(1)).reason is Reason.CANCELLED


@pytest.mark.parametrize("requeue", ["Requeue=1", "Requeue=0"])
def test_a_job_that_is_cancelled_once_the_decision_is_made_does_not_continue(slurm, supervisor, requeue):
    slurm.plan(ends("preempted", 14))
    slurm.job(RUNNING.replace("Requeue=1", requeue))
    asked = []

    def run(*question):
        answer = slurm.run(*question)
        asked.append(question)
        if len(asked) == 1:
            slurm.job(STOPS["cancelled"])
            one.job.check()
        return answer

    one = supervisor(run=run)
    assert one.run() == ExitCode.CANCELLED
    assert (slurm.requeued, slurm.submitted) == ([], "")


def test_a_step_that_srun_ends_for_a_rank_requeues_nothing(slurm, supervisor):
    slurm.plan(ends("failed", 6, warning=ABORTED))
    assert supervisor().run() == ExitCode.FAILED
    assert not slurm.requeued


@ENDS
def test_no_requeue_follows_once_it_is_decided_how_the_run_goes_on(slurm, supervisor, step, code):
    slurm.plan(step)
    one = supervisor()
    assert one.run() == code
    slurm.job(STOPS["preempted_cancel_without_grace"])
    send_sigterm(one).join(60)
    assert not slurm.requeued


@pytest.mark.parametrize("stop", ["cancelled", "preempted_without_grace", "preempted"])
def test_a_sigterm_that_needs_no_requeue_now(slurm, supervisor, stop):
    slurm.plan(ends("completed", 80, waits=True))
    slurm.job(STOPS[stop])
    one = supervisor()
    code = in_a_thread(one.run)
    until(lambda: one.ledger.last_claim() == 1)
    send_sigterm(one)
    slurm.let_ranks_end()
    assert code() == ExitCode.FINISHED
    assert not slurm.requeued


@pytest.mark.parametrize("silent", [False, True])
@ENDS
def test_a_run_that_ended_after_its_job_was_requeued_does_not_come_back(slurm, supervisor, step, code, silent):
    if silent:
        slurm.fall_silent("scancel", times=1)
    slurm.plan(replace(step, waits=True))
    slurm.job(STOPS["preempted_cancel_without_grace"])
    one = supervisor()
    ended = in_a_thread(one.run)
    until(lambda: one.ledger.last_claim() == 1)
    send_sigterm(one)
    until(lambda: slurm.requeued)
    slurm.let_ranks_end()
    assert ended() == code
    assert slurm.cancelled == ["7"]


@pytest.mark.parametrize(
    ("step", "code", "shared"),
    [
        (ends("preempted", 14), ExitCode.INTERRUPTED, False),
        (ends("failed", 6), ExitCode.FAILED, False),
        (COMPLETES, ExitCode.FINISHED, False),
        (COMPLETES, ExitCode.FINISHED, True),
    ],
)
def test_a_job_that_slurm_has_requeued_itself_does_not_come_back_after_the_end_of_its_run(
    slurm, supervisor, step, code, shared
):
    slurm.plan(replace(step, job=STOPS["preempted_without_grace"]))
    assert supervisor("cluster.requeue.max_preemptions=0", shares_job=shared).run() == code
    assert slurm.cancelled == ([] if shared else ["7"])


def test_where_no_second_attempt_can_begin_the_queue_gives_the_disk_time(slurm, supervisor):
    slurm.plan(replace(KILLED, hides="attempts"))
    one = supervisor(storage_s=0)
    assert one.run() == ExitCode.INTERRUPTED
    assert slurm.requeued == ["7"]


def test_a_requeued_job_whose_run_directory_stays_read_only_goes_back_to_the_queue(slurm, supervisor, unwritable):
    one = supervisor(storage_s=0, SLURM_RESTART_COUNT="1")
    unwritable()
    assert one.run() == ExitCode.INTERRUPTED
    assert slurm.requeued == ["7"]


@pytest.mark.parametrize(("restarts", "recorded", "continues"), [("3", 0, False), ("2", 0, True), ("5", 3, True)])
def test_a_run_directory_that_is_never_repaired_ends_the_run(
    slurm, supervisor, unwritable, restarts, recorded, continues
):
    one = supervisor(storage_s=0, SLURM_RESTART_COUNT=restarts)
    for _ in range(recorded):
        attempt = one.ledger.claim()
        one.ledger.start(attempt, job_id="7", nodes=["n1", "n2"], world_size=2, step=0)
        facts = EndFacts(next="requeue", requeued_by="hpctrain")
        one.ledger.end(attempt, facts, reason=Reason.PREEMPTED, step=5)
    unwritable()
    assert one.run() == (ExitCode.INTERRUPTED if continues else ExitCode.FAILED)
    assert bool(slurm.requeued) == continues


def test_a_cancelled_job_is_not_requeued_for_its_run_directory(slurm, supervisor, unwritable):
    one = supervisor(storage_s=0, SLURM_RESTART_COUNT="1")
    slurm.job(STOPS["cancelled"].replace("Restarts=0", "Restarts=1"))
    unwritable()
    assert one.run() == ExitCode.FAILED
    assert not slurm.requeued

"""A job whose run starts after others, with a fake SLURM."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace

import pytest

from hpctrain.errors import ExitCode
from hpctrain.run.job_records import JobRecords
from hpctrain.run.ledger import Ledger
from tests.unit.runs_before import end_attempt, run_before
from tests.unit.supervising import COMPLETES, KILLED, RUNNING, STOPS, ends, story


@pytest.fixture
def before(tmp_path):
    """The path of a run that job 20 trains."""
    return run_before(tmp_path / "before", job_id="20").path


def test_a_run_starts_when_the_one_before_it_has_completed(slurm, supervisor, before):
    slurm.plan(COMPLETES)
    one = supervisor(f"after={before}")
    end_attempt(run_before(before), "completed", "20")
    assert one.run() == ExitCode.FINISHED
    assert slurm.requeued == []


def test_a_run_waits_for_the_job_in_which_another_goes_on(slurm, supervisor, before):
    """Its own dependency was on job 20; the other run continues in job 21."""
    other = run_before(before)
    end_attempt(other, "preempted", "20")
    JobRecords(other).add({"job_id": "21", "time": time.time()})
    slurm.queue(j20={"State": "COMPLETED"}, j21={"State": "PENDING"})
    one = supervisor(f"after={before}")
    assert one.run() == ExitCode.INTERRUPTED
    assert slurm.requeued == ["7"]
    assert slurm.updated == ["JobId=7 Dependency=afterany:21"]
    assert one.ledger.last_claim() == 0
    assert JobRecords(one.directory).waits("7") == 1


def test_an_array_task_waits_alone(slurm, supervisor, before):
    slurm.queue(j20={"State": "RUNNING"})
    supervisor(f"after={before}", SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="2").run()
    assert slurm.requeued == ["5_2"]
    assert slurm.updated == ["JobId=5_2 Dependency=afterany:20"]


def test_where_no_job_can_be_waited_for_the_run_looks_again_later(slurm, supervisor, tmp_path):
    run_before(tmp_path / "local")
    assert supervisor(f"after={tmp_path}/local").run() == ExitCode.INTERRUPTED
    assert slurm.requeued == ["7"]
    assert slurm.updated == ["JobId=7 StartTime=now+300"]


def test_a_job_that_slurm_does_not_delay_is_in_the_queue_all_the_same(slurm, supervisor, before):
    slurm.queue(j20={"State": "RUNNING"})
    slurm.refuse_updates()
    assert supervisor(f"after={before}").run() == ExitCode.INTERRUPTED
    assert slurm.requeued == ["7"]


def test_a_job_that_can_t_be_requeued_is_replaced_by_one_that_waits(slurm, supervisor, before):
    slurm.queue(j20={"State": "RUNNING"})
    slurm.refuse_requeues()
    one = supervisor(f"after={before}")
    assert one.run() == ExitCode.INTERRUPTED
    assert "#SBATCH --dependency=afterany:20\n" in slurm.submitted
    assert JobRecords(one.directory).read()[-1]["job_id"] == "8"


def test_a_script_of_its_user_that_can_t_be_requeued_says_how_to_start_later(slurm, supervisor, before, caplog):
    slurm.queue(j20={"State": "RUNNING"})
    slurm.refuse_requeues()
    one = supervisor(f"after={before}", submitted=False)
    with caplog.at_level("WARNING"):
        assert one.run() == ExitCode.INTERRUPTED
    assert f"resume {one.directory.path}" in caplog.text


def test_a_job_that_its_user_cancels_while_it_looks_is_not_revived(slurm, supervisor, before):
    slurm.queue(j20={"State": "RUNNING"})
    slurm.job(STOPS["cancelled"])
    assert supervisor(f"after={before}").run() == ExitCode.CANCELLED
    assert slurm.requeued == []


def test_a_run_that_its_user_cancels_while_it_looks_is_not_revived(slurm, supervisor, before):
    """SLURM's record doesn't show it yet."""
    slurm.queue(j20={"State": "RUNNING"})
    one = supervisor(f"after={before}")
    JobRecords(one.directory).add({"cancelled": True, "time": time.time()})
    assert one.run() == ExitCode.CANCELLED
    assert slurm.requeued == []


def test_a_run_that_its_user_cancels_during_the_requeue_leaves_the_queue(slurm, supervisor, before):
    def run(arguments, *others):
        answer = slurm.run(arguments, *others)
        if "requeue" in arguments:
            JobRecords(one.directory).add({"cancelled": True, "time": time.time()})
        return answer

    slurm.queue(j20={"State": "RUNNING"})
    one = supervisor(f"after={before}", run=run)
    assert one.run() == ExitCode.CANCELLED
    assert (slurm.requeued, slurm.cancelled, slurm.updated) == (["7"], ["7"], [])


@pytest.mark.parametrize(
    ("reason", "recorded", "code"),
    [
        ("failed", "failed", ExitCode.FAILED),
        ("cancelled", "cancelled", ExitCode.CANCELLED),
        ("paused", "failed", ExitCode.FAILED),
        ("interrupted", "failed", ExitCode.FAILED),
    ],
)
def test_a_run_ends_with_the_one_before_it(slurm, supervisor, before, capfd, reason, recorded, code):
    one = supervisor(f"after={before}")
    end_attempt(run_before(before), reason, "20")
    assert one.run() == code
    (attempt,) = one.ledger.attempts()
    assert (attempt.reason, attempt.after) == (recorded, str(before))
    resume = f"python -m hpctrain resume {one.directory.path}"
    assert f"{before} is {reason}" in attempt.detail
    assert "this run starts only after it has completed" in attempt.detail
    assert f"then this one: {resume}; to start without it: {resume} after_failure=start" in attempt.detail
    assert resume in capfd.readouterr().err
    assert slurm.requeued == []


def test_a_run_ends_with_one_that_was_removed(slurm, supervisor, before):
    one = supervisor(f"after={before}")
    (before / "config.yaml").unlink()
    (before / "jobs.jsonl").unlink()
    assert one.run() == ExitCode.FAILED
    assert "its directory is gone" in one.ledger.attempts()[0].detail


def test_a_run_starts_after_a_failed_one_if_its_user_wants_that(slurm, supervisor, before):
    slurm.plan(COMPLETES)
    one = supervisor(f"after={before}", "after_failure=start")
    end_attempt(run_before(before), "failed", "20")
    assert one.run() == ExitCode.FINISHED


def test_a_run_waits_for_a_failed_one_if_its_user_wants_that(slurm, supervisor, before):
    one = supervisor(f"after={before}", "after_failure=wait")
    end_attempt(run_before(before), "failed", "20")
    assert one.run() == ExitCode.INTERRUPTED
    assert slurm.updated == ["JobId=7 StartTime=now+300"]


def test_a_run_whose_state_slurm_does_not_tell_is_waited_for(slurm, supervisor, before):
    """Its job may be in the queue."""
    end_attempt(run_before(before), "preempted", "20")
    one = supervisor(f"after={before}", silence_s=0.0)
    slurm.fall_silent("squeue")
    assert one.run() == ExitCode.INTERRUPTED
    assert slurm.requeued == ["7"]


def test_a_run_that_has_begun_does_not_look_again(slurm, supervisor, before):
    """The run before it has been resumed meanwhile."""
    slurm.plan(ends("preempted", 14), COMPLETES)
    one = supervisor(f"after={before}")
    end_attempt(run_before(before), "completed", "20")
    assert one.run() == ExitCode.INTERRUPTED
    JobRecords(run_before(before)).add({"job_id": "22", "time": time.time()})
    slurm.queue(j22={"State": "RUNNING"})
    slurm.job(RUNNING)
    assert supervisor(f"after={before}", SLURM_RESTART_COUNT=1).run() == ExitCode.FINISHED


def test_a_run_that_continues_in_a_new_job_does_not_look_again(slurm, supervisor, before):
    slurm.plan(ends("preempted", 14), COMPLETES)
    slurm.refuse_requeues()
    end_attempt(run_before(before), "completed", "20")
    one = supervisor(f"after={before}")
    assert one.run() == ExitCode.INTERRUPTED
    assert JobRecords(one.directory).read()[-1]["job_id"] == "8"
    JobRecords(run_before(before)).add({"job_id": "22", "time": time.time()})
    slurm.queue(j22={"State": "RUNNING"})
    slurm.job(RUNNING)
    assert supervisor(f"after={before}", SLURM_JOB_ID=8).run() == ExitCode.FINISHED


def test_a_resumed_run_looks_again(slurm, supervisor, before):
    one = supervisor(f"after={before}")
    end_attempt(run_before(before), "failed", "20")
    assert one.run() == ExitCode.FAILED
    # the same job, requeued by hand
    assert supervisor(f"after={before}", SLURM_RESTART_COUNT=1).run() == ExitCode.FAILED
    slurm.plan(*[COMPLETES] * 3)
    end_attempt(run_before(before), "completed", "20")
    again = supervisor(f"after={before}", SLURM_JOB_ID=9)
    assert again.run() == ExitCode.FINISHED
    assert [end for _, end, _, _ in story(again)] == ["failed", "failed", "completed"]


def test_ends_because_of_other_runs_are_no_attempts_without_progress(slurm, supervisor, before):
    """A run that gains no step in two attempts in a row ends as stalled."""
    supervisor(f"after={before}", submitted=True)
    end_attempt(run_before(before), "failed", "20")
    for _ in range(2):
        supervisor(f"after={before}").run()
    end_attempt(run_before(before), "completed", "20")
    slurm.plan(COMPLETES, COMPLETES, replace(KILLED, saves=[]), replace(COMPLETES, saves=[80]))
    one = supervisor(f"after={before}", SLURM_JOB_ID=9)
    assert one.run() == ExitCode.FINISHED


def test_waits_leave_the_requeues_of_an_unwritable_directory(slurm, supervisor, before, unwritable):
    end_attempt(run_before(before), "completed", "20")
    one = supervisor(f"after={before}", SLURM_RESTART_COUNT=4, storage_s=0.0)
    for _ in range(4):
        JobRecords(one.directory).wait("7")
    unwritable()
    assert one.run() == ExitCode.INTERRUPTED
    assert slurm.requeued == ["7"]
    assert Ledger(one.directory).attempts() == []


def test_the_users_command_learns_that_a_run_ends_because_of_another(slurm, supervisor, before, tmp_path):
    end_attempt(run_before(before), "failed", "20")
    one = supervisor(f"after={before}", f"notify.command='cat > {tmp_path}/heard'")
    assert one.run() == ExitCode.FAILED
    heard = json.loads((tmp_path / "heard").read_text())
    assert (heard["event"], heard["attempt"]) == ("failed", 1)
    assert str(before) in heard["message"]


def test_looks_become_rarer(slurm, supervisor, tmp_path):
    run_before(tmp_path / "local")
    for _ in range(3):
        assert supervisor(f"after={tmp_path}/local").run() == ExitCode.INTERRUPTED
    assert slurm.updated == [f"JobId=7 StartTime=now+{seconds}" for seconds in (300, 600, 1200)]


@pytest.mark.parametrize("failure", ["end", "wait"])
def test_nobody_can_resume_a_run_that_was_removed(slurm, supervisor, before, failure):
    one = supervisor(f"after={before}", f"after_failure={failure}")
    shutil.rmtree(before)
    assert one.run() == ExitCode.FAILED
    assert slurm.requeued == []


def test_a_file_system_that_is_missing_here_removes_no_run(slurm, supervisor, tmp_path):
    other = run_before(tmp_path / "mounted" / "runs" / "other")
    one = supervisor(f"after={other.path}", "after_failure=wait")
    (tmp_path / "mounted" / "runs").rename(tmp_path / "elsewhere")
    assert one.run() == ExitCode.INTERRUPTED
    assert slurm.requeued == ["7"]

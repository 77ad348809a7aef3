"""The job of a batch script, its attempts and its end, with a fake SLURM."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpctrain.attempt.termination import Termination
from hpctrain.errors import SchedulerError
from hpctrain.launch.prepare import plan
from hpctrain.run.directory import RunDirectory
from hpctrain.run.job_records import JobRecords
from hpctrain.run.ledger import Attempt, Ledger
from hpctrain.run.reason import Reason
from hpctrain.scheduler.job import JobState
from hpctrain.scheduler.slurm import Slurm
from hpctrain.supervise import job as job_module
from hpctrain.supervise.job import CurrentJob
from tests.unit.supervising import RUNNING, STOPS


@pytest.fixture
def job(slurm, composer, directory, monkeypatch):
    """Makes the job of a run; by default it asks a silent SLURM once."""

    run = plan(composer.compose(["cluster=slurm", "nodes=2", f"run_dir={directory.path}"]))

    def make(silence_s=0.0, **variables):
        monkeypatch.setattr(job_module, "SILENCE_S", silence_s)
        environ = slurm.environ | variables
        return CurrentJob(run, Slurm(environ, run=slurm.run), environ)

    return make


def test_the_environment_says_which_job_this_is(job):
    one = job()
    assert (one.job_id, one.nodes, one.restarts, one.attempt) == ("7", ("n1", "n2"), 0, 0)
    task = job(SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="2", SLURM_RESTART_COUNT="3")
    assert (task.job_id, task.restarts) == ("5_2", 3)


@pytest.mark.parametrize("variable", ["0", "twice"])
def test_a_count_that_differs_from_the_variable_is_no_requeue(job, slurm, variable):
    """A requeue would revive the job, which its user has cancelled."""
    slurm.job(RUNNING.replace("Restarts=0", "Restarts=1"))
    one = job(SLURM_RESTART_COUNT=variable)
    one.claim()
    assert (one.restarts, one.slurms_restarts) == (0, 1)
    slurm.job(STOPS["cancelled"].replace("Restarts=0", "Restarts=1"))
    assert one.termination().reason is Reason.CANCELLED
    slurm.job(STOPS["preempted_without_grace"].replace("Restarts=1", "Restarts=2"))
    assert one.termination().reason is Reason.PREEMPTED


def test_a_refused_requeue_is_none_though_slurm_counts_more_restarts(job, slurm):
    slurm.refuse_requeues()
    slurm.job(RUNNING.replace("Restarts=0", "Restarts=1"))
    assert not job().requeue()


def test_its_attempt_is_the_newest_that_it_claimed(job):
    one = job()
    began = one.claimed_at
    assert [one.claim(), one.claim(), one.attempt] == [1, 2, 2]
    assert one.claimed_at > began


def test_only_a_cancel_since_the_attempt_began_counts(job, directory):
    one = job()
    one.claim()
    assert not one.cancelled
    JobRecords(directory).add({"cancelled": True, "time": one.claimed_at - 1})
    assert not one.cancelled
    JobRecords(directory).add({"cancelled": True, "time": one.claimed_at})
    assert one.cancelled


def test_only_a_job_that_hpctrain_submitted_can_be_submitted_again(job, directory):
    one = job()
    assert not one.resubmittable
    JobRecords(directory).add({"job_id": "8", "time": 1.0})
    assert not one.resubmittable
    JobRecords(directory).add({"job_id": "7", "time": 2.0})
    assert one.resubmittable


def test_a_running_job_is_not_being_terminated(job):
    one = job()
    assert one.show().state is JobState.RUNNING
    assert one.termination() is None


@pytest.mark.parametrize(
    ("stop", "nodes", "reason"),
    [
        ("preempted_without_grace", [("n1", "IDLE", 0), ("n2", "IDLE", 0)], Reason.PREEMPTED),
        ("node_failed", [("n1", "IDLE", 0), ("n2", "IDLE", 0)], Reason.PREEMPTED),
        ("node_failed", [("n1", "IDLE", 0), ("n2", "DOWN", 0)], Reason.NODE_FAILURE),
    ],
)
def test_a_requeued_job_was_preempted_unless_one_of_its_nodes_failed(job, slurm, stop, nodes, reason):
    slurm.job(STOPS[stop])
    slurm.nodes(*nodes)
    found = job().termination()
    assert found.reason is reason
    assert found.evidence.startswith("n2 failed; ") is (reason is Reason.NODE_FAILURE)


def test_the_ranks_of_a_job_that_is_preempted_learn_when_slurm_will_kill_it(job, slurm, directory):
    slurm.job(STOPS["preempted"])
    one = job()
    one.check()
    one.claim()
    assert Termination.read(directory.attempt(1)) is None
    one.check()
    found = Termination.read(directory.attempt(1))
    assert (found.reason, found.deadline, found.killing) == (Reason.PREEMPTED, 1795260658, False)
    assert not slurm.requeued


def test_a_question_is_repeated_while_slurm_does_not_answer(job, slurm):
    slurm.fall_silent("scontrol", times=1)
    assert job(silence_s=30.0).show() is not None


def test_silence_is_no_answer_to_a_question_and_a_refusal_of_a_request(job, slurm, caplog):
    caplog.set_level("INFO")
    slurm.fall_silent("scontrol")
    slurm.fall_silent("scancel")
    one = job()
    assert (one.show(), one.termination()) == (None, None)
    assert not one.requeue()
    assert "job 7 can't be requeued: scontrol" in caplog.text
    one.cancel_requeue()
    assert "job 7 is still in the queue" in caplog.text
    with pytest.raises(SchedulerError, match="Unable to contact slurm controller"):
        one.delay((), 60.0)


def test_a_later_attempt_elsewhere_ends_the_questions(job, directory):
    one = job()
    one.claim()
    assert one.show() is not None
    Ledger(directory).claim()
    assert one.show() is None


def test_a_run_directory_that_cannot_be_read_does_not_end_them(job, directory):
    one = job()
    one.claim()
    shutil.rmtree(directory.claims)
    directory.claims.symlink_to(directory.claims.name)  # to itself
    assert one.show() is not None


def test_a_requeue_and_a_cancel_name_the_job(job, slurm):
    one = job()
    assert one.requeue()
    one.cancel_requeue()
    assert (slurm.requeued, slurm.cancelled) == (["7"], ["7"])


def test_a_refused_requeue_is_logged_and_asked_for_again(job, slurm, caplog):
    caplog.set_level("INFO")
    slurm.refuse_requeues()
    one = job()
    assert not one.requeue()
    assert "job 7 can't be requeued" in caplog.text
    assert "presently disabled" in caplog.text
    slurm.refuse_requeues(False)
    assert (one.requeue(), one.continuation) == (True, "job 7 is requeued")


@pytest.mark.parametrize(("ended_by", "signals"), [("TERM", ["TERM"]), ("KILL", ["TERM", "KILL"])])
def test_the_steps_of_a_killed_supervisor_may_save_before_they_are_killed(
    job, slurm, directory, monkeypatch, ended_by, signals
):
    monkeypatch.setattr(job_module, "ENDING_S", 0.1)
    monkeypatch.setattr(job_module, "KILLING_S", 0.1)
    slurm.run_steps(directory.step_name, s7_0=ended_by, s70_0="never")
    job().end_steps()
    assert slurm.cancelled == [f"--signal={name} 7.0" for name in signals]


@pytest.mark.parametrize("other", ["server", "bash", "python", RunDirectory(Path("/runs/another")).step_name])
def test_the_steps_of_others_in_the_job_are_left_alone(job, slurm, other):
    slurm.run_steps(other, s7_0="never", s7_1="never")
    job().end_steps()
    assert not slurm.cancelled


@pytest.mark.parametrize(
    ("recorded", "may"),
    [
        ({}, True),  # its ranks hadn't recorded their start
        ({"job_id": "7", "restart_count": 1}, True),
        ({"job_id": "7", "restart_count": 0}, False),
        ({"job_id": "6", "restart_count": 1}, False),
    ],
)
def test_an_attempt_ran_in_this_allocation_unless_its_start_names_another(job, recorded, may):
    attempt = Attempt(attempt=1, **recorded)
    assert job(SLURM_RESTART_COUNT="1").may_have_run(attempt) is may

"""The supervisor, with commands of SLURM that do as they are told in the place of a cluster."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hpctrain.attempt.outcome import close_patiently, judge_attempt
from hpctrain.attempt.taken_away import TakenAway
from hpctrain.attempt.unrecorded import close_silent
from hpctrain.config.compose import Composer
from hpctrain.errors import ExitCode
from hpctrain.launch.prepare import prepare
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.scheduler.slurm import Slurm
from hpctrain.supervise.supervisor import Supervisor

ABORTED = "srun: Job step aborted: Waiting up to 22 seconds for job step to finish.\n"
CAPTURED = (Path(__file__).parents[1] / "attempt" / "captured" / "stops.txt").read_text()
STOPS = dict(re.findall(r"=== (\w+) [^\n]*\n(.*?)(?=\n=== |\Z)", CAPTURED, re.DOTALL))
RUNNING = re.sub(r" EndTime=\d+", f" EndTime={int(time.time()) + 86_400}", STOPS["peer_died"])
NODE = "NodeName={name} State={state} SlurmdStartTime={started} Reason=None\n"

SUPERVISE = """
import os, sys
from hpctrain.supervise.batch_script import supervise
from hpctrain.run.directory import RunDirectory
sys.exit(supervise(RunDirectory.at(sys.argv[1]), os.environ))
"""
ANOTHERS = """
import signal, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
"""
"""Before SUPERVISE: a SIGTERM finds another thread, and the main one goes on waiting."""


def all_ranks(reason: str, step: int, **more: object) -> dict[str, object]:
    return {"0": (reason, step, more), "1": (reason, step, more)}


COMPLETES = {"start": 0, "ranks": all_ranks("completed", 80), "saves": [80]}
KILLED = {"start": 0, "saves": [10], "says": "srun: error: n2: task 1: Killed\n", "code": 137}


@pytest.fixture
def slurm(slurm):
    """A running job of two nodes."""
    slurm.job(RUNNING)
    slurm.nodes(("n1", "IDLE", 0), ("n2", "IDLE", 0))
    return slurm


@pytest.fixture(scope="module")
def composer():
    return Composer()


@pytest.fixture
def supervisor(slurm, composer, tmp_path):
    """Makes a supervisor of a run of two nodes."""

    def make(*words: str, **variables: str) -> Supervisor:
        given = ["cluster=slurm", "nodes=2", "trainer.max_steps=80", f"run_dir={tmp_path}/run", *words]
        config = composer.compose(given)
        directory = prepare(config, given).directory
        environ = slurm.environ | variables
        return Supervisor(directory, config, environ, Slurm(environ, run=slurm.run))

    return make


def story(supervisor):
    found = Ledger(supervisor.directory).attempts()
    return [(one.start_step, str(one.reason), one.end_step, one.extra.get("next")) for one in found]


def test_a_run_that_completes(slurm, supervisor):
    slurm.plan(COMPLETES)
    one = supervisor()
    assert one.run() == ExitCode.FINISHED
    assert story(one) == [(0, "completed", 80, None)]
    assert not slurm.requeued
    assert supervisor().run() == ExitCode.FINISHED  # a job that was requeued after all finds nothing to do
    assert len(story(one)) == 1


@pytest.mark.parametrize("word", ["trainer.max_steps=160", "trainer.max_epochs=20"])
def test_a_completed_run_that_was_made_longer_goes_on(slurm, supervisor, word):
    slurm.plan(COMPLETES, {"start": 80, "ranks": all_ranks("completed", 160), "saves": [160]})
    supervisor("trainer.max_steps=null").run()
    longer = supervisor("trainer.max_steps=null", word, SLURM_JOB_ID="8")
    assert longer.run() == ExitCode.FINISHED
    assert story(longer) == [(0, "completed", 80, None), (80, "completed", 160, None)]


@pytest.mark.parametrize("reason", ["preempted", "time_limit"])
def test_what_the_ranks_say_of_slurm_is_acted_upon(slurm, supervisor, reason):
    slurm.plan({"start": 0, "ranks": all_ranks(reason, 14), "saves": [14], "code": 4})
    one = supervisor()
    assert one.run() == ExitCode.INTERRUPTED
    assert story(one) == [(0, reason, 14, "requeue")]
    assert slurm.requeued == ["7"]


def test_an_array_task_requeues_itself_alone(slurm, supervisor):
    slurm.plan({"start": 0, "ranks": all_ranks("preempted", 14), "code": 4})
    supervisor(SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="2").run()
    assert slurm.requeued == ["5_2"]


def test_a_dead_rank_is_replaced_in_the_allocation_first(slurm, supervisor):
    slurm.plan(KILLED, {**COMPLETES, "start": 10})
    one = supervisor()
    assert one.run() == ExitCode.FINISHED
    assert story(one) == [(0, "infrastructure", 10, "restart"), (10, "completed", 80, None)]
    assert not slurm.requeued


def test_a_second_failure_of_the_allocation_leads_back_to_the_queue(slurm, supervisor):
    slurm.plan(KILLED, {**KILLED, "start": 10, "saves": [20]})
    one = supervisor()
    assert one.run() == ExitCode.INTERRUPTED
    assert [entry[3] for entry in story(one)] == ["restart", "requeue"]


def test_a_node_that_fails_again_is_excluded_with_all_that_were_before(slurm, supervisor):
    slurm.plan(
        {"start": 0, "saves": [10], "ranks": {"0": ("infrastructure", 10, {"blames_peer": True})}},
        {"start": 10, "saves": [20], "ranks": {"0": ("infrastructure", 20, {"blames_peer": True})}},
    )
    one = supervisor("cluster.exclude=n9")
    ledger = Ledger(one.directory)
    ledger.start(ledger.claim(), job_id="3", nodes=["n4"], world_size=2, step=0)
    ledger.end(1, reason=Reason.INFRASTRUCTURE, step=5, saved_step=5, suspects=["n4"], exclude=["n4"])
    slurm.plan({}, *json.loads((slurm.home / "plan.json").read_text()))
    assert one.run() == ExitCode.INTERRUPTED
    assert [entry[3] for entry in story(one)] == [None, "restart", "resubmit"]
    assert "#SBATCH --exclude=n9,n4,n2" in slurm.submitted
    last = ledger.attempts()[-1]
    assert (last.extra["suspects"], last.extra["exclude"]) == (["n2"], ["n2"])
    assert one.directory.job_records()[-1]["job_id"] == "8"


def test_a_node_is_excluded_by_the_name_that_slurm_gives_it(slurm, supervisor):
    ecc = {"1": ("infrastructure", 10, {"host": "node2.cluster.example", "message": "uncorrectable ECC error"})}
    slurm.plan({"start": 0, "saves": [10], "ranks": ecc}, {"start": 10, "saves": [20], "ranks": ecc})
    one = supervisor()
    assert one.run() == ExitCode.INTERRUPTED
    assert "#SBATCH --exclude=n2\n" in slurm.submitted


def test_a_broken_node_is_excluded_though_no_step_was_saved(slurm, supervisor):
    slurm.plan({"start": 0, "ranks": {"1": ("infrastructure", 5, {"message": "uncorrectable ECC error"})}})
    one = supervisor()
    assert one.run() == ExitCode.INTERRUPTED
    assert story(one) == [(0, "infrastructure", 5, "restart"), (0, "infrastructure", 5, "resubmit")]
    assert "#SBATCH --exclude=n2\n" in slurm.submitted


def test_a_job_that_slurm_may_not_requeue_is_followed_by_a_new_one(slurm, supervisor):
    slurm.plan({"start": 0, "ranks": all_ranks("preempted", 14), "saves": [14], "code": 4})
    slurm.job(RUNNING.replace("Requeue=1", "Requeue=0"))
    one = supervisor()
    assert one.run() == ExitCode.INTERRUPTED
    assert story(one) == [(0, "preempted", 14, "resubmit")]
    assert not slurm.requeued
    assert one.directory.job_records()[-1]["job_id"] == "8"


@pytest.mark.parametrize("reason", ["preempted", "interrupted"])
def test_a_controller_that_is_silent_for_a_moment_costs_no_run(slurm, supervisor, reason):
    slurm.plan({"start": 0, "ranks": all_ranks(reason, 14), "saves": [14], "job": STOPS["preempted"], "code": 4})
    slurm.fall_silent("scontrol", times=3)
    one = supervisor()
    assert one.run() == ExitCode.INTERRUPTED
    assert story(one) == [(0, "preempted", 14, "requeue")]
    assert (slurm.requeued, slurm.submitted) == (["7"], "")


def test_where_the_requeue_is_refused_a_new_job_goes_on(slurm, supervisor):
    slurm.plan({"start": 0, "ranks": all_ranks("preempted", 14), "saves": [14], "code": 4})
    slurm.refuse_requeues()
    one = supervisor()
    assert one.run() == ExitCode.INTERRUPTED
    assert "--job-name" in slurm.submitted
    assert one.directory.job_records()[-1]["job_id"] == "8"


def test_a_job_that_slurm_has_requeued_already_is_not_submitted_again(slurm, supervisor):
    slurm.plan({"start": 0, "ranks": all_ranks("preempted", 14), "job": STOPS["preempted_without_grace"], "code": 4})
    slurm.refuse_requeues()
    assert supervisor().run() == ExitCode.INTERRUPTED
    assert not slurm.submitted


@pytest.mark.parametrize(
    ("stop", "reason", "follows"),
    [
        ("preempted", "preempted", "requeue"),
        ("preempted_cancel_without_grace", "preempted", "requeue"),
        ("time_limit_over", "time_limit", "requeue"),
        ("cancelled", "cancelled", None),
    ],
)
def test_ranks_that_died_before_they_could_tell_are_no_failure(slurm, supervisor, stop, reason, follows):
    slurm.plan({"job": STOPS[stop], "says": "srun: error: n1: task 0: Terminated\n", "code": 143})
    one = supervisor()
    one.run()
    assert story(one) == [(0, reason, 0, follows)]
    assert slurm.requeued == (["7"] if follows else [])


def test_ranks_that_could_not_ask_slurm_leave_that_to_the_batch_script(slurm, supervisor):
    slurm.plan({"start": 0, "ranks": all_ranks("interrupted", 14), "saves": [14], "job": STOPS["preempted"], "code": 4})
    one = supervisor()
    one.run()
    assert story(one) == [(0, "preempted", 14, "requeue")]


def test_with_the_cause_unknown_nothing_is_requeued(slurm, supervisor):
    slurm.plan({"start": 0, "ranks": all_ranks("interrupted", 14), "saves": [14], "job": "", "code": 4})
    one = supervisor()
    one.job.silence_s = 0
    assert one.run() == ExitCode.INTERRUPTED
    assert story(one) == [(0, "interrupted", 14, None)]
    assert not slurm.requeued


def test_a_cancelled_run_is_never_requeued_though_it_was_preempted_as_well(slurm, supervisor):
    slurm.plan({"waits": True, "start": 0, "ranks": all_ranks("preempted", 14), "saves": [14], "code": 4})
    one = supervisor()
    code = in_a_thread(one.run)
    until(lambda: one.ledger.last_claim() == 1)
    one.directory.record_job({"cancelled": True, "time": time.time()})
    slurm.let_ranks_end()
    assert code() == ExitCode.CANCELLED
    assert story(one) == [(0, "cancelled", 14, None)]
    assert not slurm.requeued


@pytest.mark.parametrize("silent", [0, 2])
def test_a_job_that_its_user_cancels_while_the_ranks_save_is_not_revived(slurm, supervisor, silent):
    slurm.plan({"start": 0, "ranks": all_ranks("time_limit", 14), "saves": [14], "job": STOPS["cancelled"], "code": 4})
    slurm.fall_silent("scontrol", times=silent)
    one = supervisor()
    assert one.run() == ExitCode.CANCELLED
    assert story(one) == [(0, "cancelled", 14, None)]
    assert "time_limit" in one.ledger.attempts()[0].detail
    assert not slurm.requeued


def test_a_job_that_its_user_cancels_is_not_followed_by_a_new_one(slurm, supervisor):
    may_not = STOPS["cancelled"].replace("Requeue=1", "Requeue=0")
    slurm.plan({"start": 0, "ranks": all_ranks("time_limit", 14), "saves": [14], "job": may_not, "code": 4})
    assert supervisor().run() == ExitCode.CANCELLED
    assert not slurm.submitted


@pytest.mark.parametrize(
    "stop", ["time_limit_near", "time_limit_over", "preempted", "preempted_cancel", "preempted_cancel_without_grace"]
)
def test_a_job_that_slurm_itself_ends_is_requeued_all_the_same(slurm, supervisor, stop):
    slurm.plan({"start": 0, "ranks": all_ranks("time_limit", 14), "saves": [14], "job": STOPS[stop], "code": 4})
    one = supervisor()
    assert one.run() == ExitCode.INTERRUPTED
    assert story(one) == [(0, "time_limit", 14, "requeue")]
    assert slurm.requeued == ["7"]


def test_an_error_of_the_tasks_own_ends_the_run(slurm, supervisor, capfd):
    error = {"message": "ValueError: no", "traceback": "Traceback: here"}
    slurm.plan({"start": 0, "ranks": all_ranks("failed", 6, **error), "code": 1})
    one = supervisor()
    assert one.run() == ExitCode.FAILED
    assert story(one) == [(0, "failed", 6, None)]
    told = capfd.readouterr().err
    assert "Traceback: here" in told
    assert f"resume {one.directory.path}" in told


def test_a_superseded_attempt_leaves_the_ledger_alone(slurm, supervisor):
    slurm.plan({"start": 0, "touches": ["attempts/0002"], "code": 1})
    one = supervisor()
    assert one.run() == ExitCode.INTERRUPTED
    assert story(one) == [(0, "None", None, None)]
    assert not slurm.requeued


@pytest.mark.parametrize(("stop", "silent"), [("preempted_cancel_without_grace", 0), ("time_limit_over", 1)])
def test_a_job_that_is_being_killed_is_requeued_before_its_ranks_are_gone(slurm, supervisor, stop, silent):
    slurm.plan({"waits": True, "start": 0, "ranks": all_ranks("preempted", 14), "saves": [14], "code": 4})
    slurm.job(STOPS[stop])
    slurm.fall_silent("scontrol", times=silent)
    one = supervisor()
    code = in_a_thread(one.run)
    until(lambda: one.ledger.last_claim() == 1)
    ring(one)
    until(lambda: slurm.requeued)
    noted = TakenAway.read(one.directory.claim(1))
    assert noted is not None
    assert noted.reason.value in stop
    slurm.let_ranks_end()
    assert code() == ExitCode.INTERRUPTED
    assert slurm.requeued == ["7"]  # not a second time
    # what was found before the requeue counts: after it any end looks like a preemption
    assert story(one) == [(0, noted.reason.value, 14, "requeue")]


@pytest.mark.parametrize("patience_s", [0.0, 100.0])
def test_a_job_that_is_killed_before_its_first_attempt_is_requeued_too(slurm, supervisor, monkeypatch, patience_s):
    """It may not live until the earlier ones are judged."""
    monkeypatch.setattr("hpctrain.supervise.lookout.CLAIM_S", patience_s)
    slurm.plan({"waits": True, "start": 0, "ranks": all_ranks("preempted", 0), "code": 4})
    slurm.job(STOPS["preempted_cancel_without_grace"])
    one = supervisor()
    ring(one)
    if not patience_s:
        until(lambda: slurm.requeued)
    code = in_a_thread(one.run)
    until(lambda: slurm.requeued)
    slurm.let_ranks_end()
    assert code() == ExitCode.INTERRUPTED
    assert slurm.requeued == ["7"]


def test_a_job_that_srun_sees_end_is_requeued_without_a_sigterm(slurm, supervisor):
    aborted = {"warns": ABORTED, "waits": True}
    slurm.plan({**aborted, "start": 0, "ranks": all_ranks("preempted", 14), "saves": [14], "code": 4})
    slurm.job(STOPS["preempted_cancel_without_grace"])
    one = supervisor()
    code = in_a_thread(one.run)
    until(lambda: slurm.requeued)
    ring(one).join(60)
    slurm.let_ranks_end()
    assert code() == ExitCode.INTERRUPTED
    assert slurm.requeued == ["7"]
    assert story(one) == [(0, "preempted", 14, "requeue")]


@pytest.mark.parametrize("early", [False, True])
def test_a_signal_that_ends_the_command_that_asks_is_no_refusal(slurm, supervisor, early):
    """SLURM signals all processes of the batch step, scontrol among them."""
    slurm.kill_next_requeue()
    aborted = {"warns": ABORTED, "waits": True} if early else {}
    slurm.plan({**aborted, "start": 0, "ranks": all_ranks("preempted", 14), "saves": [14], "code": 4})
    slurm.job(STOPS["preempted_cancel_without_grace"])
    one = supervisor()
    code = in_a_thread(one.run)
    until(lambda: slurm.requeued == ["7", "7"])
    slurm.let_ranks_end()
    assert code() == ExitCode.INTERRUPTED
    assert not slurm.submitted


def test_an_early_requeue_that_is_refused_is_asked_for_at_the_next_signal_again(slurm, supervisor):
    slurm.plan({"waits": True, "start": 0, "ranks": all_ranks("preempted", 14), "saves": [14], "code": 4})
    slurm.job(STOPS["preempted_cancel_without_grace"])
    slurm.refuse_requeues()
    one = supervisor()
    code = in_a_thread(one.run)
    until(lambda: one.ledger.last_claim() == 1)
    ring(one).join(60)
    assert slurm.requeued == ["7"]
    slurm.refuse_requeues(False)
    ring(one).join(60)
    assert slurm.requeued == ["7", "7"]
    slurm.let_ranks_end()
    assert code() == ExitCode.INTERRUPTED
    assert slurm.requeued == ["7", "7"]


def test_a_preempted_job_that_its_user_cancels_is_not_requeued_early(slurm, supervisor):
    """SLURM's record is that of a preemption; what was typed tells the difference."""
    slurm.plan({"waits": True, "start": 0, "ranks": all_ranks("preempted", 14), "saves": [14], "code": 4})
    slurm.job(STOPS["preempted_cancel_without_grace"])
    one = supervisor()
    code = in_a_thread(one.run)
    until(lambda: one.ledger.last_claim() == 1)
    one.directory.record_job({"cancelled": True, "time": time.time()})
    ring(one).join(60)
    slurm.let_ranks_end()
    assert code() == ExitCode.CANCELLED
    assert not slurm.requeued
    assert TakenAway.read(one.directory.claim(1)).reason is Reason.CANCELLED


@pytest.mark.parametrize("requeue", ["Requeue=1", "Requeue=0"])
def test_a_job_that_is_cancelled_once_it_is_known_how_it_goes_on_does_not(slurm, supervisor, monkeypatch, requeue):
    slurm.plan({"start": 0, "ranks": all_ranks("preempted", 14), "saves": [14], "code": 4})
    slurm.job(RUNNING.replace("Requeue=1", requeue))
    one = supervisor()

    def cancelled_meanwhile(*told, **more):
        slurm.job(STOPS["cancelled"])
        one.lookout.look()
        close_patiently(*told, **more)

    monkeypatch.setattr("hpctrain.supervise.supervisor.close_patiently", cancelled_meanwhile)
    assert one.run() == ExitCode.CANCELLED
    assert (slurm.requeued, slurm.submitted) == ([], "")


SIGNALLED = {"message": "CppCompileError: C++ compile error", "stop_signal": int(signal.SIGTERM)}


@pytest.mark.parametrize(
    ("stop", "number", "reason", "follows"),
    [
        ("preempted", signal.SIGTERM, "preempted", "requeue"),
        ("time_limit_near", signal.SIGUSR2, "time_limit", "requeue"),
        ("cancelled", signal.SIGTERM, "cancelled", None),
        ("peer_died", signal.SIGTERM, "failed", None),
    ],
)
def test_an_error_after_a_signal_may_be_that_of_a_child_process(slurm, supervisor, stop, number, reason, follows):
    error = SIGNALLED | {"stop_signal": int(number)}
    # the captured job's time is over by now
    record = re.sub(r" EndTime=\d+", f" EndTime={int(time.time()) + 90}", STOPS[stop])
    slurm.plan({"start": 0, "ranks": all_ranks("failed", 6, **error), "job": record, "code": 1})
    one = supervisor()
    one.run()
    assert story(one) == [(0, reason, 6, follows)]
    assert "CppCompileError" in one.ledger.attempts()[0].detail or reason == "cancelled"


def test_an_error_that_follows_a_signal_twice_in_a_row_is_the_tasks(slurm, supervisor):
    slurm.plan({"start": 0, "ranks": all_ranks("failed", 6, **SIGNALLED), "job": STOPS["preempted"], "code": 1})
    assert supervisor().run() == ExitCode.INTERRUPTED
    one = supervisor(SLURM_RESTART_COUNT="1")
    assert one.run() == ExitCode.FAILED
    assert [reason for _, reason, _, _ in story(one)] == ["preempted", "failed"]


@pytest.mark.parametrize(("times", "follows"), [(2, True), (999, False)])
def test_a_file_system_that_can_t_be_read_for_a_while_keeps_no_attempt_from_its_judgement(
    slurm, supervisor, monkeypatch, times, follows
):
    slurm.plan({"start": 0, "ranks": all_ranks("preempted", 14), "saves": [14], "code": 4})
    one = supervisor()
    one.patience_s = 0.0 if not follows else 60.0
    left = [times]

    def read(*asked):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return judge_attempt(*asked)

    monkeypatch.setattr("hpctrain.supervise.supervisor.judge_attempt", read)
    assert one.run() == ExitCode.INTERRUPTED
    assert slurm.requeued == ["7"]
    assert story(one) == ([(0, "preempted", 14, "requeue")] if follows else [(0, "None", None, None)])


def test_a_node_that_dies_under_a_job_that_may_not_be_requeued_is_no_cancel(slurm, supervisor):
    slurm.nodes(("n1", "IDLE", 0), ("n2", "DOWN+NOT_RESPONDING", 0))
    died = STOPS["cancelled"].replace(" Reason=None", " Reason=NodeDown").replace("Requeue=1", "Requeue=0")
    slurm.plan({"start": 0, "saves": [10], "job": died, "says": "srun: error: Node failure on n2\n", "code": 1})
    one = supervisor()
    assert one.run() == ExitCode.INTERRUPTED
    assert story(one) == [(0, "node_failure", 10, "resubmit")]
    assert slurm.submitted


def test_a_step_that_srun_ends_for_a_rank_requeues_nothing(slurm, supervisor):
    slurm.plan({"warns": ABORTED, "start": 0, "ranks": all_ranks("failed", 6), "code": 1})
    assert supervisor().run() == ExitCode.FAILED
    assert not slurm.requeued


def test_no_requeue_follows_once_it_is_decided_how_the_run_goes_on(slurm, supervisor):
    slurm.plan({"start": 0, "ranks": all_ranks("failed", 6), "code": 1})
    one = supervisor()
    assert one.run() == ExitCode.FAILED
    slurm.job(STOPS["preempted_cancel_without_grace"])
    ring(one).join(60)
    assert not slurm.requeued


@pytest.mark.parametrize("program", [SUPERVISE, ANOTHERS + SUPERVISE], ids=["noticed", "while it begins to wait"])
def test_no_sigterm_is_lost(slurm, supervisor, program):
    """With a full disk, which refuses the word about it; and as the main thread begins to wait for what srun says."""
    slurm.plan({"waits": True, "start": 0, "ranks": all_ranks("preempted", 14), "saves": [14], "code": 4})
    slurm.job(STOPS["preempted_cancel_without_grace"])
    one = supervisor()
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-c", program, one.directory.path]
        process = subprocess.Popen(command, stdout=full, stderr=subprocess.DEVNULL, env=slurm.environ)
    until(lambda: slurm.steps)
    process.send_signal(signal.SIGTERM)
    until(lambda: slurm.requeued)
    slurm.let_ranks_end()
    process.wait(60)
    assert story(one) == [(0, "preempted", 14, "requeue")]


@pytest.mark.parametrize("stop", ["cancelled", "preempted_without_grace", "preempted"])
def test_a_sigterm_that_needs_no_requeue_now(slurm, supervisor, stop):
    slurm.plan({"waits": True, "start": 0, "ranks": all_ranks("completed", 80), "saves": [80]})
    slurm.job(STOPS[stop])
    one = supervisor()
    code = in_a_thread(one.run)
    until(lambda: one.ledger.last_claim() == 1)
    ring(one)
    slurm.let_ranks_end()
    assert code() == ExitCode.FINISHED
    assert not slurm.requeued


@pytest.mark.parametrize("silent", [False, True])
def test_a_run_that_failed_after_its_job_was_requeued_does_not_come_back(slurm, supervisor, silent):
    if silent:
        slurm.fall_silent("scancel", times=1)
    slurm.plan({"waits": True, "start": 0, "ranks": all_ranks("failed", 6), "code": 1})
    slurm.job(STOPS["preempted_cancel_without_grace"])
    one = supervisor()
    code = in_a_thread(one.run)
    until(lambda: one.ledger.last_claim() == 1)
    ring(one)
    until(lambda: slurm.requeued)
    slurm.let_ranks_end()
    assert code() == ExitCode.FAILED
    assert slurm.cancelled == ["7"]


@pytest.mark.parametrize(
    ("nodes", "reason", "words"),
    [
        ([("n1", "IDLE", 0), ("n2", "DOWN+NOT_RESPONDING", 0)], "node_failure", "n2 failed"),
        ([("n1", "IDLE", 50), ("n2", "IDLE", 0)], "node_failure", "n1 failed"),
        ([("n1", "IDLE", 0), ("n2", "MIXED", 0)], "preempted", "no time for a word"),
    ],
)
def test_an_attempt_without_a_word_is_closed_by_the_next_one(slurm, supervisor, nodes, reason, words):
    one = supervisor(SLURM_RESTART_COUNT="1")
    ledger = Ledger(one.directory)
    ledger.start(ledger.claim(), job_id="7", nodes=["n1", "n2"], world_size=2, step=0)
    earlier = (one.directory.attempts).read_text().replace('"time": ', '"time": 40, "then": ')
    one.directory.attempts.write_text(earlier)
    slurm.nodes(*nodes)
    slurm.plan({}, COMPLETES)
    one.run()
    assert [entry[1] for entry in story(one)] == [reason, "completed"]
    closed = ledger.attempts()[0]
    assert words in closed.detail
    assert closed.extra["requeued_by"] == "slurm"


def test_the_batch_scripts_last_words_are_believed(slurm, supervisor):
    one = supervisor(SLURM_RESTART_COUNT="1")
    ledger = Ledger(one.directory)
    ledger.start(ledger.claim(), job_id="7", nodes=["n1", "n2"], world_size=2, step=0)
    TakenAway(Reason.TIME_LIMIT, "JobState=COMPLETING Reason=TimeLimit").write(one.directory.claim(1))
    close_silent(one.directory, one.slurm, "7", 2)
    (closed,) = ledger.attempts()
    assert (closed.reason, "Reason=TimeLimit" in closed.detail) == (Reason.TIME_LIMIT, True)


FAILS = {**KILLED, "says": "srun: error: Node failure on n2\n"}


def down(*names):
    """What scontrol says when these of three nodes are down."""
    states = {name: "DOWN" if name in names else "IDLE" for name in ("n1", "n2", "n3")}
    return "".join(NODE.format(name=name, state=state, started=0) for name, state in states.items())


def test_a_spare_node_takes_the_place_of_one_that_died(slurm, supervisor):
    slurm.plan({**FAILS, "nodes": down("n2")}, {**COMPLETES, "start": 10})
    one = supervisor("cluster.spare_nodes=1", SLURM_JOB_NODELIST="n[1-3]")
    assert one.run() == ExitCode.FINISHED
    assert story(one) == [(0, "node_failure", 10, "restart"), (10, "completed", 80, None)]
    first, second = slurm.steps
    assert "--nodes=2 " in first
    assert ("--nodelist=n1,n2" in first, "--nodelist=n1,n3" in second) == (True, True)
    assert "--no-kill --mem=0" in second
    assert not slurm.requeued


def test_without_a_spare_node_left_the_queue_gives_another(slurm, supervisor):
    slurm.plan({**FAILS, "nodes": down("n2", "n3")})
    one = supervisor("cluster.spare_nodes=1", SLURM_JOB_NODELIST="n[1-3]")
    assert one.run() == ExitCode.INTERRUPTED
    assert story(one) == [(0, "node_failure", 10, "requeue")]
    assert slurm.requeued == ["7"]


def test_a_node_that_fails_again_is_replaced_by_a_spare_one(slurm, supervisor):
    lost = {"0": ("infrastructure", 10, {"blames_peer": True})}
    slurm.plan(
        {"start": 0, "saves": [10], "ranks": lost},
        {"start": 10, "saves": [20], "ranks": lost},
        {**COMPLETES, "start": 20},
    )
    slurm.nodes(("n1", "IDLE", 0), ("n2", "IDLE", 0), ("n3", "IDLE", 0))
    one = supervisor("cluster.spare_nodes=1", SLURM_JOB_NODELIST="n[1-3]")
    assert one.run() == ExitCode.FINISHED
    assert [entry[3] for entry in story(one)] == ["restart", "restart", None]
    assert "--nodelist=n1,n3" in slurm.steps[2]


@pytest.mark.parametrize(
    ("waits", "node", "reason"),
    [
        (True, "DOWN+NOT_RESPONDING", "node_failure"),  # the others waited for it
        (True, "IDLE", "hang"),
        (False, "DOWN+NOT_RESPONDING", "hang"),  # it was stuck before
    ],
)
def test_a_hang_that_was_recorded_gives_way_only_to_what_slurm_knows(slurm, supervisor, waits, node, reason):
    one = supervisor(SLURM_RESTART_COUNT="1")
    ledger = Ledger(one.directory)
    ledger.start(ledger.claim(), job_id="7", nodes=["n1", "n2"], world_size=2, step=0)
    hang = ExitRecord(rank=0, host="n1", reason=Reason.HANG, step=5, message="no step", blames_peer=waits)
    hang.write(one.directory.claim(1))
    slurm.nodes(("n1", "IDLE", 0), ("n2", node, 0))
    close_silent(one.directory, one.slurm, "7", 2)
    (closed,) = ledger.attempts()
    assert (closed.reason, closed.end_step) == (reason, 5)


def test_an_end_that_can_t_be_recorded_at_once_is_recorded_as_soon_as_it_can_be(slurm, supervisor, caplog):
    slurm.plan({**KILLED, "hides": "attempts.jsonl"}, {**COMPLETES, "start": 10})
    one = supervisor()
    code = in_a_thread(one.run)
    until(lambda: "can't be recorded" in caplog.text)
    one.directory.attempts.with_suffix(".hidden").replace(one.directory.attempts)
    assert code() == ExitCode.FINISHED
    assert [entry[1] for entry in story(one)] == ["infrastructure", "completed"]


def test_where_no_second_attempt_can_begin_the_queue_gives_the_disk_time(slurm, supervisor):
    slurm.plan({**KILLED, "hides": "attempts"})
    one = supervisor()
    one.patience_s = 0
    assert one.run() == ExitCode.INTERRUPTED
    assert slurm.requeued == ["7"]


def test_where_no_first_attempt_can_begin_the_run_has_failed(slurm, supervisor, capfd):
    one = supervisor()
    shutil.rmtree(one.directory.claims)
    assert one.run() == ExitCode.FAILED
    assert "can't be claimed" in capfd.readouterr().err
    assert not slurm.requeued


@pytest.fixture
def unwritable(monkeypatch):
    """Makes that so many claims fail, or all of them."""

    def make(times=None):
        real, left = Path.mkdir, [times]

        def mkdir(path, *more, **options):
            if path.parent.name == "attempts" and left[0] != 0:
                left[0] = left[0] and left[0] - 1
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return real(path, *more, **options)

        monkeypatch.setattr(Path, "mkdir", mkdir)

    return make


def test_a_requeued_job_gives_its_run_directory_time(slurm, supervisor, unwritable):
    slurm.plan(COMPLETES)
    one = supervisor(SLURM_RESTART_COUNT="1")
    unwritable(times=2)
    assert one.run() == ExitCode.FINISHED
    assert story(one) == [(0, "completed", 80, None)]


def test_a_requeued_job_whose_run_directory_stays_read_only_goes_back_to_the_queue(slurm, supervisor, unwritable):
    one = supervisor(SLURM_RESTART_COUNT="1")
    one.patience_s = 0
    unwritable()
    assert one.run() == ExitCode.INTERRUPTED
    assert slurm.requeued == ["7"]


@pytest.mark.parametrize(("restarts", "told", "goes_on"), [("3", 0, False), ("2", 0, True), ("5", 3, True)])
def test_a_run_directory_that_is_never_mended_ends_the_run(slurm, supervisor, unwritable, restarts, told, goes_on):
    one = supervisor(SLURM_RESTART_COUNT=restarts)
    one.patience_s = 0
    for _ in range(told):
        attempt = one.ledger.claim()
        one.ledger.start(attempt, job_id="7", nodes=["n1", "n2"], world_size=2, step=0)
        one.ledger.end(attempt, reason=Reason.PREEMPTED, step=5, next="requeue", requeued_by="hpctrain")
    unwritable()
    assert one.run() == (ExitCode.INTERRUPTED if goes_on else ExitCode.FAILED)
    assert bool(slurm.requeued) == goes_on


def test_a_cancelled_job_is_not_requeued_for_its_run_directory(slurm, supervisor, unwritable):
    one = supervisor(SLURM_RESTART_COUNT="1")
    one.patience_s = 0
    slurm.job(STOPS["cancelled"].replace("Restarts=0", "Restarts=1"))
    unwritable()
    assert one.run() == ExitCode.FAILED
    assert not slurm.requeued


def ring(supervisor):
    """What a SIGTERM does."""
    bell, rope = os.pipe()
    thread = threading.Thread(target=supervisor.lookout.heed, args=(bell,), daemon=True)
    thread.start()
    os.write(rope, bytes([signal.SIGUSR1, signal.SIGTERM]))
    os.close(rope)
    return thread


def in_a_thread(function):
    """Starts a function; calling what is returned gives what it returned."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()

    def result():
        thread.join(120)
        return found[0]

    return result


def until(ready):
    give_up = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < give_up
        time.sleep(0.01)

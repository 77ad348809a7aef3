"""The attempts of one allocation, with a fake SLURM."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.errors import ExitCode
from hpctrain.run.code import current_code
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.job_records import JobRecords
from hpctrain.run.ledger import EndFacts, Ledger, StartFacts
from hpctrain.run.reason import Reason
from hpctrain.startup import __version__
from hpctrain.supervise.ranks import srun_command
from tests.unit.fakes import NODE, Step, exit_record
from tests.unit.supervising import COMPLETES, KILLED, RUNNING, STOPS, all_ranks, ends, in_a_thread, story, until

FAILS = replace(KILLED, stderr="srun: error: Node failure on n2\n")
SIGNALLED = {"message": "CppCompileError: C++ compile error", "stop_signal": int(signal.SIGTERM)}


def down(*names):
    """What scontrol prints when these of four nodes are down."""
    states = {name: "DOWN" if name in names else "IDLE" for name in ("n1", "n2", "n3", "n4")}
    return "".join(NODE.format(name, state, 0) for name, state in states.items())


def test_a_run_that_completes(slurm, supervisor):
    slurm.plan(COMPLETES)
    one = supervisor()
    assert one.run() == ExitCode.FINISHED
    assert story(one) == [(0, "completed", 80, None)]
    assert not slurm.requeued
    assert supervisor().run() == ExitCode.FINISHED  # a job that was requeued after all finds nothing to do
    assert len(story(one)) == 1


@pytest.mark.parametrize("word", ["trainer.max_steps=160", "trainer.max_epochs=20"])
def test_a_completed_run_that_was_made_longer_continues(slurm, supervisor, word):
    slurm.plan(COMPLETES, ends("completed", 160, start=80))
    supervisor("trainer.max_steps=null").run()
    longer = supervisor("trainer.max_steps=null", word, SLURM_JOB_ID="8")
    assert longer.run() == ExitCode.FINISHED
    assert story(longer) == [(0, "completed", 80, None), (80, "completed", 160, None)]


@pytest.mark.parametrize("reason", ["preempted", "time_limit"])
def test_what_the_ranks_record_about_slurm_is_acted_upon(slurm, supervisor, reason):
    slurm.plan(ends(reason, 14))
    one = supervisor()
    assert one.run() == ExitCode.INTERRUPTED
    assert story(one) == [(0, reason, 14, "requeue")]
    assert slurm.requeued == ["7"]


def test_a_dead_rank_is_replaced_in_the_allocation_first(slurm, supervisor):
    slurm.plan(KILLED, replace(COMPLETES, start=10))
    one = supervisor()
    assert one.run() == ExitCode.FINISHED
    assert story(one) == [(0, "infrastructure", 10, "restart"), (10, "completed", 80, None)]
    assert not slurm.requeued


def test_a_second_failure_of_the_allocation_leads_back_to_the_queue(slurm, supervisor):
    slurm.plan(KILLED, replace(KILLED, start=10, saves=[20]))
    one = supervisor()
    assert one.run() == ExitCode.INTERRUPTED
    assert [entry[3] for entry in story(one)] == ["restart", "requeue"]


def test_a_node_that_fails_again_is_excluded_with_all_that_were_before(slurm, supervisor):
    slurm.plan(
        Step(start=0, exits=[exit_record(0, "infrastructure", 10, blames_peer=True)], saves=[10]),
        Step(start=10, exits=[exit_record(0, "infrastructure", 20, blames_peer=True)], saves=[20]),
        first=2,
    )
    one = supervisor("cluster.exclude=n9")
    ledger = Ledger(one.directory)
    ledger.start(ledger.claim(), job_id="3", nodes=["n4"], world_size=2, step=0)
    facts = EndFacts(saved_step=5, suspects=("n4",), exclude=("n4",))
    ledger.end(1, facts, reason=Reason.INFRASTRUCTURE, step=5)
    assert one.run() == ExitCode.INTERRUPTED
    assert [entry[3] for entry in story(one)] == [None, "restart", "resubmit"]
    assert "#SBATCH --exclude=n9,n4,n2" in slurm.submitted
    last = ledger.attempts()[-1]
    assert (last.suspects, last.exclude) == (("n2",), ("n2",))
    assert JobRecords(one.directory).read()[-1]["job_id"] == "8"


def test_suspects_come_from_where_the_ranks_began(slurm, supervisor):
    """SLURM 26.05 gives the first tasks to the nodes of the first switch, which need not be the first nodes."""
    lost = [exit_record(0, "infrastructure", 10, blames_peer=True)]
    places = {0: "n2", 1: "n1"}
    slurm.plan(
        Step(start=0, exits=lost, saves=[10], begun=places),
        Step(start=10, exits=lost, saves=[20], begun=places),
    )
    one = supervisor()
    assert one.run() == ExitCode.INTERRUPTED
    assert [attempt.suspects for attempt in one.ledger.attempts()] == [("n1",), ("n1",)]
    assert "#SBATCH --exclude=n1" in slurm.submitted


def test_the_node_of_a_rank_that_never_began_is_unknown(slurm, supervisor):
    lost = [exit_record(0, "infrastructure", 10, blames_peer=True)]
    slurm.plan(
        Step(start=0, exits=lost, saves=[10], begun={0: "n1"}),
        Step(start=10, exits=lost, saves=[20], begun={0: "n1"}),
    )
    one = supervisor()
    assert one.run() == ExitCode.INTERRUPTED
    assert [entry[3] for entry in story(one)] == ["restart", "requeue"]
    for attempt in one.ledger.attempts():
        assert attempt.suspects == ()
        assert attempt.detail.endswith("; no start record names the node of rank 1")


def test_srun_names_the_node_of_a_rank_that_was_killed_before_it_recorded_it(slurm, supervisor):
    lost = [exit_record(0, "infrastructure", 10, blames_peer=True)]
    says = "srun: error: n2: task 1: Killed\n"
    slurm.plan(Step(start=0, exits=lost, saves=[10], begun={0: "n1"}, stderr=says), COMPLETES)
    one = supervisor()
    one.run()
    assert one.ledger.attempt(1).suspects == ("n2",)


def test_a_node_is_excluded_by_the_name_that_slurm_gives_it(slurm, supervisor):
    ecc = [exit_record(1, "infrastructure", 10, host="node2.cluster.example", message="uncorrectable ECC error")]
    slurm.plan(Step(start=0, exits=ecc, saves=[10]), Step(exits=ecc, start=10, saves=[20]))
    one = supervisor()
    assert one.run() == ExitCode.INTERRUPTED
    assert "#SBATCH --exclude=n2\n" in slurm.submitted


def test_a_broken_node_is_excluded_though_no_step_was_saved(slurm, supervisor):
    slurm.plan(*[Step(start=0, exits=[exit_record(1, "infrastructure", 5, message="uncorrectable ECC error")])] * 2)
    one = supervisor()
    assert one.run() == ExitCode.INTERRUPTED
    assert story(one) == [(0, "infrastructure", 5, "restart"), (0, "infrastructure", 5, "resubmit")]
    assert "#SBATCH --exclude=n2\n" in slurm.submitted


def test_a_job_that_slurm_may_not_requeue_is_followed_by_a_new_one(slurm, supervisor):
    slurm.plan(ends("preempted", 14))
    slurm.job(RUNNING.replace("Requeue=1", "Requeue=0"))
    one = supervisor()
    assert one.run() == ExitCode.INTERRUPTED
    assert story(one) == [(0, "preempted", 14, "resubmit")]
    assert not slurm.requeued
    assert JobRecords(one.directory).read()[-1]["job_id"] == "8"


@pytest.mark.parametrize("reason", ["preempted", "interrupted"])
def test_a_controller_that_is_silent_for_a_moment_costs_no_run(slurm, supervisor, reason):
    slurm.plan(ends(reason, 14, job=STOPS["preempted"]))
    slurm.fall_silent("scontrol", times=3)
    one = supervisor()
    assert one.run() == ExitCode.INTERRUPTED
    assert story(one) == [(0, "preempted", 14, "requeue")]
    assert (slurm.requeued, slurm.submitted) == (["7"], "")


@pytest.mark.parametrize(
    ("stop", "reason", "follows"),
    [
        ("preempted", "preempted", "requeue"),
        ("preempted_cancel_without_grace", "preempted", "requeue"),
        ("time_limit_over", "time_limit", "requeue"),
        ("cancelled", "cancelled", None),
    ],
)
def test_ranks_that_died_before_they_could_record_anything_did_not_fail(slurm, supervisor, stop, reason, follows):
    slurm.plan(Step(job=STOPS[stop], stderr="srun: error: n1: task 0: Terminated\n", exit_code=143))
    one = supervisor()
    one.run()
    assert story(one) == [(0, reason, 0, follows)]
    assert slurm.requeued == (["7"] if follows else [])


def test_ranks_that_could_not_ask_slurm_leave_that_to_the_supervisor(slurm, supervisor):
    slurm.plan(ends("interrupted", 14, job=STOPS["preempted"]))
    one = supervisor()
    one.run()
    assert story(one) == [(0, "preempted", 14, "requeue")]


@pytest.mark.parametrize("job", [RUNNING, ""], ids=["running", "SLURM doesn't answer"])
def test_a_signal_that_slurm_does_not_explain_gets_new_ranks_and_never_a_requeue(slurm, supervisor, job):
    stopped = Step(exits=all_ranks("interrupted", 14), saves=[14], job=job)
    slurm.plan(replace(stopped, start=0), replace(stopped, start=14), replace(COMPLETES, start=14))
    one = supervisor(silence_s=0)
    assert one.run() == ExitCode.FINISHED
    assert [(reason, follows) for _, reason, _, follows in story(one)] == [
        *[("interrupted", "restart")] * 2,
        ("completed", None),
    ]
    assert not slurm.requeued


def test_unexplained_signals_end_the_run_after_the_budget_of_failures(slurm, supervisor):
    slurm.plan(*[ends("interrupted", 14)] * 3)
    one = supervisor("cluster.requeue.max_failures=2")
    assert one.run() == ExitCode.INTERRUPTED
    assert [entry[3] for entry in story(one)] == ["restart", "restart", None]
    assert not slurm.requeued


def test_a_cancel_that_the_ranks_took_for_an_unexplained_signal_ends_the_run(slurm, supervisor):
    slurm.plan(ends("interrupted", 14, job=STOPS["cancelled"]))
    one = supervisor()
    assert one.run() == ExitCode.CANCELLED
    assert story(one) == [(0, "cancelled", 14, None)]


def test_a_cancelled_run_is_never_requeued_though_it_was_preempted_as_well(slurm, supervisor):
    slurm.plan(ends("preempted", 14, waits=True))
    one = supervisor()
    code = in_a_thread(one.run)
    until(lambda: one.ledger.last_claim() == 1)
    JobRecords(one.directory).add({"cancelled": True, "time": time.time()})
    slurm.let_ranks_end()
    assert code() == ExitCode.CANCELLED
    assert story(one) == [(0, "cancelled", 14, None)]
    assert not slurm.requeued


@pytest.mark.parametrize("silent", [0, 2])
def test_a_job_that_its_user_cancels_while_the_ranks_save_is_not_revived(slurm, supervisor, silent):
    slurm.plan(ends("time_limit", 14, job=STOPS["cancelled"]))
    slurm.fall_silent("scontrol", times=silent)
    one = supervisor()
    assert one.run() == ExitCode.CANCELLED
    assert story(one) == [(0, "cancelled", 14, None)]
    assert "time_limit" in one.ledger.attempts()[0].detail
    assert not slurm.requeued


def test_a_job_that_its_user_cancels_is_not_followed_by_a_new_one(slurm, supervisor):
    may_not = STOPS["cancelled"].replace("Requeue=1", "Requeue=0")
    slurm.plan(ends("time_limit", 14, job=may_not))
    assert supervisor().run() == ExitCode.CANCELLED
    assert not slurm.submitted


@pytest.mark.parametrize(
    "stop", ["time_limit_near", "time_limit_over", "preempted", "preempted_cancel", "preempted_cancel_without_grace"]
)
def test_a_job_that_slurm_itself_ends_is_requeued_all_the_same(slurm, supervisor, stop):
    slurm.plan(ends("time_limit", 14, job=STOPS[stop]))
    one = supervisor()
    assert one.run() == ExitCode.INTERRUPTED
    assert story(one) == [(0, "time_limit", 14, "requeue")]
    assert slurm.requeued == ["7"]


def test_an_error_of_the_tasks_own_ends_the_run(slurm, supervisor, capfd):
    error = {"message": "ValueError: no", "traceback": "Traceback: here"}
    slurm.plan(Step(start=0, exits=all_ranks("failed", 6, **error)))
    one = supervisor()
    assert one.run() == ExitCode.FAILED
    assert story(one) == [(0, "failed", 6, None)]
    printed = capfd.readouterr().err
    assert "Traceback: here" in printed
    assert f"resume {one.directory.path}" in printed


def test_a_superseded_attempt_leaves_the_ledger_alone(slurm, supervisor):
    slurm.plan(Step(start=0, is_superseded=True))
    one = supervisor()
    assert one.run() == ExitCode.INTERRUPTED
    assert story(one) == [(0, "None", None, None)]
    assert not slurm.requeued


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
    slurm.plan(Step(start=0, exits=all_ranks("failed", 6, **error), job=record))
    one = supervisor()
    one.run()
    assert story(one) == [(0, reason, 6, follows)]
    assert "CppCompileError" in one.ledger.attempts()[0].detail or reason == "cancelled"


def test_an_error_that_follows_a_signal_twice_in_a_row_is_the_tasks(slurm, supervisor):
    slurm.plan(*[Step(start=0, exits=all_ranks("failed", 6, **SIGNALLED), job=STOPS["preempted"])] * 2)
    assert supervisor().run() == ExitCode.INTERRUPTED
    one = supervisor(SLURM_RESTART_COUNT="1")
    assert one.run() == ExitCode.FAILED
    assert [reason for _, reason, _, _ in story(one)] == ["preempted", "failed"]


@pytest.mark.parametrize(("times", "follows"), [(2, True), (999, False)])
def test_a_file_system_that_cannot_be_read_for_a_while_delays_the_outcome(
    slurm, supervisor, monkeypatch, times, follows
):
    slurm.plan(ends("preempted", 14))
    one = supervisor(storage_s=60.0 if follows else 0.0)
    real, left = Path.iterdir, [times]

    def iterdir(path):
        if path.name == "checkpoints" and slurm.steps and left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert one.run() == ExitCode.INTERRUPTED
    assert slurm.requeued == ["7"]
    assert story(one) == ([(0, "preempted", 14, "requeue")] if follows else [(0, "None", None, None)])


def test_a_node_that_dies_under_a_job_that_may_not_be_requeued_is_no_cancel(slurm, supervisor):
    slurm.nodes(("n1", "IDLE", 0), ("n2", "DOWN+NOT_RESPONDING", 0))
    died = STOPS["cancelled"].replace(" Reason=None", " Reason=NodeDown").replace("Requeue=1", "Requeue=0")
    slurm.plan(Step(start=0, saves=[10], job=died, stderr="srun: error: Node failure on n2\n"))
    one = supervisor()
    assert one.run() == ExitCode.INTERRUPTED
    assert story(one) == [(0, "node_failure", 10, "resubmit")]
    assert slurm.submitted


def test_a_spare_node_takes_the_place_of_one_that_died(slurm, supervisor):
    slurm.plan(replace(FAILS, nodes=down("n2")), replace(COMPLETES, start=10))
    one = supervisor("cluster.spare_nodes=1", SLURM_JOB_NODELIST="n[1-3]")
    assert one.run() == ExitCode.FINISHED
    assert story(one) == [(0, "node_failure", 10, "restart"), (10, "completed", 80, None)]
    first, second = slurm.steps
    assert "--nodes=2 " in first
    assert ("--nodelist=n1,n2" in first, "--nodelist=n1,n3" in second) == (True, True)
    assert "--no-kill --mem=0" in second
    assert not slurm.requeued


def test_without_a_spare_node_left_the_queue_gives_another(slurm, supervisor):
    slurm.plan(replace(FAILS, nodes=down("n2", "n3")))
    one = supervisor("cluster.spare_nodes=1", SLURM_JOB_NODELIST="n[1-3]")
    assert one.run() == ExitCode.INTERRUPTED
    assert story(one) == [(0, "node_failure", 10, "requeue")]
    assert slurm.requeued == ["7"]


def test_a_run_continues_on_fewer_nodes_when_one_died(slurm, supervisor):
    slurm.plan(replace(FAILS, nodes=down("n2")), replace(COMPLETES, start=10))
    one = supervisor("nodes=4", "cluster.min_nodes=2", SLURM_JOB_NODELIST="n[1-4]")
    assert one.run() == ExitCode.FINISHED
    assert story(one) == [(0, "node_failure", 10, "restart"), (10, "completed", 80, None)]
    first, second = slurm.steps
    assert ("--nodes=4 " in first, "--nodelist=n1,n2,n3,n4" in first) == (True, True)
    # 64 samples can't be divided among three
    assert ("--nodes=2 " in second, "--nodelist=n1,n3 --no-kill" in second) == (True, True)
    assert not slurm.requeued


def test_a_second_node_that_dies_is_not_counted_with_the_first(slurm, supervisor):
    slurm.plan(
        replace(FAILS, nodes=down("n2")),
        replace(FAILS, start=10, saves=[20], nodes=down("n2", "n4")),
        replace(COMPLETES, start=20),
    )
    one = supervisor("nodes=4", "cluster.min_nodes=2", "trainer.global_batch_size=12", SLURM_JOB_NODELIST="n[1-4]")
    assert one.run() == ExitCode.FINISHED
    assert [entry[3] for entry in story(one)] == ["restart", "restart", None]
    assert [step.split("--nodelist=")[1].split()[0] for step in slurm.steps] == ["n1,n2,n3,n4", "n1,n3,n4", "n1,n3"]
    assert one.ledger.attempt(2).detail == "n4 failed"


def test_an_allocation_that_is_too_small_is_left_to_srun_to_refuse(slurm, supervisor):
    slurm.plan(Step(start=0, stderr="srun: error: Unable to create step"), COMPLETES)
    one = supervisor("nodes=4", "cluster.min_nodes=2", SLURM_JOB_NODELIST="n1")
    one.run()
    assert "--nodes=2 " in slurm.steps[0]


def test_a_job_may_get_fewer_nodes_than_before(slurm, supervisor, caplog):
    caplog.set_level(logging.INFO, "hpctrain.supervise")
    slurm.plan(KILLED, COMPLETES)
    one = supervisor("nodes=4", "cluster.min_nodes=1", SLURM_JOB_NODELIST="n[1,4]")
    assert one.run() == ExitCode.FINISHED
    assert "--nodes=2 " in slurm.steps[0]
    assert "attempt 1 on n1 n4: 2 of 4 nodes" in caplog.text
    assert one.ledger.attempt(1).world_size == 2


def test_a_node_that_fails_again_is_replaced_by_a_spare_one(slurm, supervisor):
    lost = [exit_record(0, "infrastructure", 10, blames_peer=True)]
    slurm.plan(
        Step(start=0, exits=lost, saves=[10]),
        Step(start=10, exits=lost, saves=[20]),
        replace(COMPLETES, start=20),
    )
    slurm.nodes(("n1", "IDLE", 0), ("n2", "IDLE", 0), ("n3", "IDLE", 0))
    one = supervisor("cluster.spare_nodes=1", SLURM_JOB_NODELIST="n[1-3]")
    assert one.run() == ExitCode.FINISHED
    assert [entry[3] for entry in story(one)] == ["restart", "restart", None]
    assert "--nodelist=n1,n3" in slurm.steps[2]


def test_an_end_that_can_t_be_recorded_at_once_is_recorded_as_soon_as_it_can_be(slurm, supervisor, caplog):
    slurm.plan(replace(KILLED, hides="attempts.jsonl"), replace(COMPLETES, start=10))
    one = supervisor()
    code = in_a_thread(one.run)
    until(lambda: "can't be recorded" in caplog.text)
    one.directory.attempts.with_suffix(".hidden").replace(one.directory.attempts)
    assert code() == ExitCode.FINISHED
    assert [entry[1] for entry in story(one)] == ["infrastructure", "completed"]


def test_where_no_first_attempt_can_begin_the_run_has_failed(slurm, supervisor, capfd):
    one = supervisor()
    shutil.rmtree(one.directory.claims)
    assert one.run() == ExitCode.FAILED
    assert "can't be claimed" in capfd.readouterr().err
    assert not slurm.requeued


def test_a_requeued_job_gives_its_run_directory_time(slurm, supervisor, unwritable):
    slurm.plan(COMPLETES)
    one = supervisor(SLURM_RESTART_COUNT="1")
    unwritable(times=2)
    assert one.run() == ExitCode.FINISHED
    assert story(one) == [(0, "completed", 80, None)]


@pytest.mark.usefixtures("without_space")
def test_a_retry_of_a_claim_is_not_a_further_attempt(slurm, supervisor):
    slurm.plan(COMPLETES)
    one = supervisor(SLURM_RESTART_COUNT="1")
    assert one.run() == ExitCode.FINISHED
    assert (one.directory.claimed_attempts(), story(one)) == ([1], [(0, "completed", 80, None)])


@pytest.mark.usefixtures("without_space")
def test_a_new_run_without_space_for_its_claim_has_failed(supervisor, capfd):
    one = supervisor()
    assert one.run() == ExitCode.FAILED
    assert "can't be claimed (No space left on device; " in capfd.readouterr().err
    assert one.directory.claimed_attempts() == []


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_new_supervisor_ends_the_ranks_of_one_that_was_killed_in_the_same_allocation(slurm, supervisor, restarts):
    slurm.plan(replace(COMPLETES, start=14), first=2)
    one = supervisor(SLURM_RESTART_COUNT=restarts)
    claim = one.directory.attempt(one.ledger.claim())
    facts = StartFacts(restart_count=restarts)
    one.ledger.start(1, facts, job_id="7", nodes=["n1", "n2"], world_size=2, step=0)
    (one.directory.checkpoints / "step_00000014").mkdir(parents=True)
    for rank in range(2):
        ExitRecord(rank=rank, host="n1", reason=Reason.INTERRUPTED, step=14).write(claim)
    slurm.run_steps(one.directory.step_name, s7_0="TERM")
    assert one.run() == ExitCode.FINISHED
    assert slurm.cancelled == ["--signal=TERM 7.0"]
    assert [entry[:3] for entry in story(one)] == [(0, "interrupted", 14), (14, "completed", 80)]
    assert one.ledger.attempts()[0].requeued_by is None


def test_a_supervisor_whose_predecessor_recorded_the_end_looks_for_no_step(slurm, supervisor):
    slurm.plan(COMPLETES, first=2)
    one = supervisor()
    one.ledger.end(one.ledger.claim(), reason=Reason.INTERRUPTED, step=0)
    slurm.run_steps(one.directory.step_name, s7_0="never")
    assert one.run() == ExitCode.FINISHED
    assert not slurm.cancelled


def test_a_supervisor_looks_for_no_step_of_an_attempt_before_the_requeue(slurm, supervisor):
    slurm.plan(COMPLETES, first=2)
    one = supervisor(SLURM_RESTART_COUNT="1")
    facts = StartFacts(restart_count=0)
    one.ledger.start(one.ledger.claim(), facts, job_id="7", nodes=["n1", "n2"], world_size=2, step=0)
    slurm.run_steps(one.directory.step_name, s7_0="never")
    assert one.run() == ExitCode.FINISHED
    assert not slurm.cancelled


@pytest.mark.parametrize(
    ("word", "nodes", "node", "advice"),
    [
        (
            "nodes=2",
            "n[1-2]",
            "the node of rank 1",
            "; to find the node: python -m hpctrain doctor cluster=slurm nodes=2",
        ),
        ("cluster.processes_per_node=2", "n1", "n1", ""),
    ],
)
def test_a_node_that_does_not_see_the_run_directory_is_named(slurm, supervisor, word, nodes, node, advice):
    says = "srun: error: task 1 launch failed: Slurmd could not connect IO\n"
    # srun, which is asked to end the step, would wait for rank 0
    slurm.plan(Step(warning=says, waits=True, exit_code=137))
    words = [word] if "nodes" in word else ["nodes=1", word]
    one = supervisor("cluster.requeue.max_stalled_attempts=1", *words, SLURM_JOB_NODELIST=nodes)
    assert one.run() == ExitCode.FAILED
    (attempt,) = one.ledger.attempts()
    remedy = "put the run directory on a file system that all nodes share"
    assert f"{node} can't write into {one.directory.path}; {remedy}{advice}" in attempt.detail


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a module, in which the job was submitted."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "mine.py").write_text("x = 1\n")
    monkeypatch.chdir(folder)
    return folder


def test_every_attempt_s_code_is_compared_with_its_list(slurm, supervisor, project):
    slurm.plan(KILLED, COMPLETES)
    one = supervisor(copied=True)
    code = current_code(one.directory)
    (project / "mine.py").write_text("x = 2\n")  # the original may change
    assert one.run() == ExitCode.FINISHED
    (code.folder / "mine.py").chmod(0o600)
    (code.folder / "mine.py").write_text("x = 2\n")
    again = supervisor("trainer.max_steps=160", SLURM_JOB_ID="8")
    assert again.run() == ExitCode.FAILED
    last = Ledger(again.directory).attempts()[-1]
    assert (last.reason, last.code) == (Reason.FAILED, code.digest)
    assert last.detail.startswith(f"{code.folder}/mine.py was changed since the code was taken: restore it, or take")
    assert not slurm.requeued


def test_ranks_import_from_the_copy(slurm, supervisor, project):
    one = supervisor(copied=True)
    code = current_code(one.directory)
    command = srun_command(one.plan, code=code)
    assert command[command.index(sys.executable) + 1] == "-P"
    assert srun_command(one.plan)[-4:-1] == ["-u", "-m", "hpctrain.train"]


@pytest.mark.parametrize(
    ("words", "python"), [([], sys.executable), (["cluster.python=/opt/venv/bin/python"], "/opt/venv/bin/python")]
)
def test_a_python_that_can_not_run_the_ranks_ends_the_run(slurm, supervisor, capfd, words, python):
    exited = "srun: error: n2: task 1: Exited with exit code 127\n"
    # the other rank was waiting for it, and srun asked it to stop
    slurm.plan(Step(exits=[exit_record(0, "interrupted", 0)], stderr=exited, exit_code=127))
    one = supervisor(*words)
    one.directory.rank_log(1).write_text("env: '/opt/venv/bin/python': No such file or directory\n")
    assert one.run() == ExitCode.FAILED
    assert story(one) == [(0, "failed", 0, None)]
    (attempt,) = Ledger(one.directory).attempts()
    assert attempt.detail.startswith(
        f"the ranks' Python on n2, {python}, can't be started (env: '/opt/venv/bin/python'"
    )
    assert attempt.detail in capfd.readouterr().err
    assert not slurm.requeued


def test_a_resume_with_the_same_python_ends_again_since_no_ranks_have_begun(slurm, supervisor):
    exited = "srun: error: n2: task 1: Exited with exit code 127\n"
    refused = Step(exits=[exit_record(0, "interrupted", 0)], stderr=exited, exit_code=127)
    slurm.plan(refused, refused)
    one = supervisor()
    one.directory.rank_log(1).write_text("env: '/opt/venv/bin/python': No such file or directory\n")
    assert one.run() == ExitCode.FAILED
    assert supervisor(SLURM_JOB_ID="8").run() == ExitCode.FAILED
    assert [reason for _, reason, _, _ in story(one)] == ["failed", "failed"]
    assert not slurm.requeued


def test_a_node_that_has_lost_the_python_does_not_end_a_run_whose_ranks_have_begun(slurm, supervisor):
    exited = "srun: error: n2: task 1: Exited with exit code 127\n"
    slurm.plan(
        ends("hang", 40),
        Step(exits=[], stderr=exited, exit_code=127),
    )
    one = supervisor()
    one.directory.rank_log(1).write_text("env: '/opt/venv/bin/python': No such file or directory\n")
    assert one.run() == ExitCode.INTERRUPTED
    assert slurm.requeued
    assert [reason for _, reason, _, _ in story(one)] == ["hang", "infrastructure"]
    assert "the ranks' Python on n2" in Ledger(one.directory).attempts()[1].detail


@pytest.mark.parametrize(("is_there", "reason"), [(False, "failed"), (True, "infrastructure")])
def test_an_srun_that_cannot_be_started_ends_the_attempt_in_one_line(slurm, supervisor, is_there, reason):
    slurm.environ["PATH"] = str(slurm.home)  # the machine may have one
    srun = slurm.home / "srun"
    srun.chmod(0o644) if is_there else srun.unlink()
    one = supervisor("cluster.requeue.max_failures=0")
    assert one.run() == ExitCode.FAILED
    assert story(one) == [(0, reason, 0, None)]
    assert "srun can't be started (" in Ledger(one.directory).attempts()[0].detail


def test_an_srun_that_is_lost_once_ranks_have_begun_may_come_back(slurm, supervisor):
    slurm.environ["PATH"] = str(slurm.home)
    slurm.plan(ends("hang", 40))
    one = supervisor()
    run = one.ranks.run

    def lose_after_the_first(attempt, code, **more):
        if attempt > 1:
            (slurm.home / "srun").unlink()
        return run(attempt, code, **more)

    one.ranks.run = lose_after_the_first
    assert one.run() == ExitCode.INTERRUPTED
    assert [reason for _, reason, _, _ in story(one)] == ["hang", "infrastructure"]


def test_the_ranks_learn_the_supervisors_version(slurm, supervisor):
    slurm.plan(COMPLETES)
    keeps = slurm.home / "environ"
    slurm.script("srun", f'echo "$HPCTRAIN_VERSION" > {keeps}; exit 1')
    supervisor("cluster.requeue.max_failures=0").run()
    assert keeps.read_text() == f"{__version__}\n"

"""Attempts without an end record, closed by the next one, with a fake SLURM."""

from __future__ import annotations

import json
import os
import socket

import pytest

from hpctrain.attempt.termination import Termination
from hpctrain.attempt.unrecorded import UnrecordedEnds
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.scheduler.slurm import Slurm


@pytest.fixture
def close(directory, slurm):
    """Closes an attempt of two ranks in job 7, and returns what the ledger holds of it then."""
    slurm.nodes(("n1", "IDLE", 0), ("n2", "IDLE", 0))

    def close_in(job_id="7", restarts=1, **records):
        ledger = Ledger(directory, clock=lambda: 40.0)
        ledger.start(ledger.claim(), job_id="7", nodes=["n1", "n2"], world_size=2, step=0)
        for rank, fields in records.items():
            known = {"rank": int(rank[-1]), "host": "n1", "step": 9, "message": "the message"}
            ExitRecord(**(known | fields)).write(directory.attempt(1))
        UnrecordedEnds(directory, Slurm(slurm.environ, run=slurm.run), job_id, restarts).close(2)
        (closed,) = ledger.attempts()
        return closed

    return close_in


@pytest.mark.parametrize(
    ("nodes", "reason", "words"),
    [
        ([("n1", "IDLE", 0), ("n2", "DOWN+NOT_RESPONDING", 0)], "node_failure", "n2 failed"),
        ([("n1", "IDLE", 50), ("n2", "IDLE", 0)], "node_failure", "n1 failed"),
        ([("n1", "IDLE", 0), ("n2", "MIXED", 0)], "preempted", "no time to record the end"),
    ],
)
def test_a_job_that_slurm_requeued_by_itself(close, slurm, nodes, reason, words):
    slurm.nodes(*nodes)
    closed = close()
    assert (closed.reason, closed.requeued_by, closed.closed_late) == (reason, "slurm", True)
    assert words in closed.detail


@pytest.mark.parametrize(("job_id", "restarts"), [("7", 0), (None, 0)])
def test_an_attempt_of_this_allocation_was_killed_and_not_requeued(close, slurm, job_id, restarts):
    """A script may start ranks twice, one after the other."""
    slurm.queue(j7={"State": "FAILED", "Name": "run"})
    closed = close(job_id, restarts)
    assert closed.reason is Reason.INFRASTRUCTURE
    assert closed.requeued_by is None


def test_an_attempt_of_another_job_ended_as_that_job_did(close, slurm):
    slurm.queue(j7={"State": "TIMEOUT", "Name": "run"})
    assert close(job_id="8", restarts=0).reason is Reason.TIME_LIMIT


def test_an_attempt_of_a_job_that_still_runs_is_taken_over(close, slurm):
    slurm.queue(j7={"State": "RUNNING", "Name": "run"})
    closed = close(job_id="8", restarts=0)
    assert (closed.reason, "still exists" in closed.detail) == (Reason.INTERRUPTED, True)


def test_a_job_that_slurm_has_forgotten(close):
    closed = close(job_id="8", restarts=0)
    assert (closed.reason, closed.detail) == (
        Reason.INFRASTRUCTURE,
        "ended without a record: SLURM no longer knows job 7",
    )


@pytest.mark.parametrize("killing", [True, False])
def test_what_the_batch_script_could_still_write_down_is_believed(directory, killing):
    """Unless it is a warning, after which a node may have died."""
    claim = directory.claims / "0001"
    termination = Termination(Reason.TIME_LIMIT, "JobState=COMPLETING Reason=TimeLimit", killing=killing)
    assert Termination.read(claim) is None
    ledger = Ledger(directory)
    ledger.claim()
    termination.write(claim)
    UnrecordedEnds(directory, Slurm({"PATH": ""}), "7", 1).close(2)
    (closed,) = ledger.attempts()
    assert closed.reason is (Reason.TIME_LIMIT if killing else Reason.NODE_FAILURE)
    assert ("Reason=TimeLimit" in closed.detail) is killing


@pytest.mark.parametrize(
    ("waits", "node", "reason"),
    [
        (True, "DOWN+NOT_RESPONDING", "node_failure"),  # the others waited for it
        (True, "IDLE", "hang"),
        (False, "DOWN+NOT_RESPONDING", "hang"),  # it was stuck before
    ],
)
def test_a_recorded_hang_gives_way_only_to_what_slurm_knows(close, slurm, waits, node, reason):
    slurm.nodes(("n1", "IDLE", 0), ("n2", node, 0))
    closed = close(rank_0={"reason": Reason.HANG, "step": 5, "blames_peer": waits})
    assert (closed.reason, closed.end_step) == (reason, 5)


@pytest.mark.parametrize(
    ("left", "blames_peer", "reason", "step"),
    [
        (Reason.INFRASTRUCTURE, True, Reason.NODE_FAILURE, 9),
        (Reason.HANG, True, Reason.HANG, 9),
        (Reason.FAILED, False, Reason.FAILED, 9),
        (Reason.PREEMPTED, False, Reason.PREEMPTED, 9),
        (Reason.COMPLETED, False, Reason.NODE_FAILURE, 9),
    ],
)
def test_what_one_rank_recorded_counts(close, slurm, left, blames_peer, reason, step):
    slurm.fall_silent("scontrol")
    closed = close(rank_1={"reason": left, "blames_peer": blames_peer})
    assert (closed.reason, closed.end_step) == (reason, step)


def test_without_any_record_the_times_tell_the_last_step(close, directory, slurm):
    slurm.fall_silent("scontrol")
    (directory.claims / "0001").mkdir()
    (directory.claims / "0001" / "times.json").write_text('{"last_step": 11}')
    UnrecordedEnds(directory, Slurm(slurm.environ, run=slurm.run), "7", 1).close(2)
    (closed,) = Ledger(directory).attempts()
    assert (closed.reason, closed.end_step) == (Reason.NODE_FAILURE, 11)


def test_attempts_that_have_an_end_are_left_alone(directory):
    ledger = Ledger(directory)
    ledger.start(ledger.claim(), job_id=None, nodes=["n1"], world_size=1, step=0)
    ledger.end(1, reason=Reason.COMPLETED, step=9)
    before = directory.attempts.read_text()
    UnrecordedEnds(directory, Slurm({"PATH": ""})).close(1)
    assert directory.attempts.read_text() == before


@pytest.mark.parametrize(
    ("alive", "reason", "words"),
    [(True, Reason.INTERRUPTED, "takes over from it"), (False, Reason.INFRASTRUCTURE, "its processes were killed")],
)
def test_an_attempt_that_another_launch_supersedes_was_not_killed(directory, slurm, alive, reason, words):
    ledger = Ledger(directory)
    number = ledger.claim()
    # two launches at the same moment: the launcher of the first still runs
    pid = os.getppid() if alive else 2**22 + 1
    owner = directory.attempt(number) / "owner.json"
    owner.write_text(json.dumps({"host": socket.gethostname(), "pid": pid}))
    UnrecordedEnds(directory, Slurm(slurm.environ, run=slurm.run)).close(1)
    (closed,) = ledger.attempts()
    assert closed.reason == reason
    assert words in closed.detail

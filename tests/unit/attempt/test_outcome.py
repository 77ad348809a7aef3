"""How an attempt ended, from its ranks' exit records."""

import pytest

from hpctrain.attempt.outcome import Outcome, record_end, train_on_command
from hpctrain.errors import ExitCode
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason


def record(rank, reason=Reason.COMPLETED, **fields):
    return ExitRecord(rank=rank, host=f"n{rank}", reason=reason, step=fields.pop("step", 7), **fields)


def records(*found):
    return {entry.rank: entry for entry in found}


def test_all_completed_is_completed():
    outcome = Outcome.from_records(records(record(0), record(1)), 2, 0)
    assert (outcome.reason, outcome.reason.meaning.exit_code, outcome.report) == (
        Reason.COMPLETED,
        ExitCode.FINISHED,
        "",
    )


def test_a_run_that_ended_early_says_why(run):
    ended = records(record(0, message="early_stopping: no gain"), record(1, message="early_stopping: no gain"))
    outcome = Outcome.from_records(ended, 2, 0)
    assert (outcome.reason, outcome.headline) == (Reason.COMPLETED, "early_stopping: no gain")
    command = f"python -m hpctrain resume {run.as_typed}"
    assert train_on_command(run, outcome.headline) == f"{command} '~callbacks.early_stopping'"
    assert train_on_command(run, "trainer.max_time_min=5: over") == f"{command} trainer.max_time_min=MINUTES"


def test_the_rank_that_failed_is_named_and_not_those_that_lost_it():
    lost = record(0, Reason.INFRASTRUCTURE, message="Connection closed by peer", blames_peer=True, time=1.0)
    failed = record(1, Reason.FAILED, message="ValueError: no", traceback="Traceback: here", time=2.0)
    outcome = Outcome.from_records(records(lost, failed), 2, 0)
    assert outcome.reason is Reason.FAILED
    assert outcome.reason.meaning.exit_code == ExitCode.FAILED
    assert "rank 1 on n1" in outcome.report
    assert "Traceback: here" in outcome.report


def test_a_rank_that_died_without_a_record_is_the_cause_of_its_peers_errors():
    lost = record(0, Reason.INFRASTRUCTURE, message="Connection closed by peer", blames_peer=True)
    outcome = Outcome.from_records(records(lost), 2, 5)
    assert outcome.reason is Reason.INFRASTRUCTURE
    assert "rank 1 of 2" in outcome.report
    assert outcome.step == 7


def test_interrupted_ranks_are_resumable():
    outcome = Outcome.from_records(records(record(0, Reason.INTERRUPTED), record(1, Reason.INTERRUPTED)), 2, 0)
    assert outcome.reason.meaning.exit_code == ExitCode.INTERRUPTED


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory.at(tmp_path / "run")
    directory.create(0o750)
    return directory


def test_an_attempt_without_a_single_record_gets_its_start_and_its_end(run):
    ledger = Ledger(run)
    attempt = ledger.claim()
    record_end(run, attempt, Outcome.of_attempt(run, attempt, 2), world_size=2)
    (entry,) = ledger.attempts()
    assert (entry.attempt, entry.reason, entry.world_size, entry.start_step) == (1, Reason.INFRASTRUCTURE, 2, 0)


def test_an_end_that_rank_zero_recorded_stands(run):
    ledger = Ledger(run)
    attempt = ledger.claim()
    ledger.start(attempt, job_id="1", nodes=["n1"], world_size=1, step=0)
    ledger.end(attempt, reason=Reason.COMPLETED, step=9)
    record(0, step=9).write(run.claim(attempt))
    record_end(run, attempt, Outcome.of_attempt(run, attempt, 1), world_size=1)
    assert [entry.reason for entry in ledger.attempts()] == [Reason.COMPLETED]
    assert len(run.attempts.read_text().splitlines()) == 2


def hang(rank, *, waits, time=0.0, reason=Reason.HANG):
    stack = f'  File "task.py", line {rank}, in loss\n'
    message = f"no step for 60 s; stacks: logs/stacks_1_{rank}.txt"
    return ExitRecord(
        rank=rank,
        host=f"n{rank}",
        reason=reason,
        step=7,
        message=message,
        traceback=stack,
        blames_peer=waits,
        time=time,
    )


def outcome_of(*found, world_size):
    return Outcome.from_records(records(*found), world_size, 0)


def test_the_rank_outside_of_a_collective_is_the_cause_even_if_it_spoke_last():
    lost = hang(2, waits=True, reason=Reason.INFRASTRUCTURE)
    outcome = outcome_of(hang(0, waits=True, time=1.0), hang(1, waits=False, time=2.0), lost, world_size=3)
    assert (outcome.reason, outcome.reason.meaning.exit_code, outcome.step) == (Reason.HANG, 1, 7)
    assert outcome.report.splitlines() == [
        "rank 1 on n1 hangs after step 7: no step for 60 s; stacks: logs/stacks_1_1.txt; rank 0 waited for others",
        '  File "task.py", line 1, in loss',
    ]


def test_where_the_others_wait_the_rank_without_a_record_is_named():
    outcome = outcome_of(hang(0, waits=True), hang(2, waits=True, time=1.0), world_size=3)
    assert (outcome.reason, outcome.silent_ranks) == (Reason.HANG, (1,))
    assert outcome.report == (
        "rank 0 on n0 hangs after step 7: no step for 60 s; stacks: logs/stacks_1_0.txt; rank 1 left no exit record: "
        "stopped, its machine gone, or stuck outside of Python; ranks 0, 2 waited for others"
    )


def test_a_rank_that_woke_up_when_the_others_ended_is_named():
    woken = hang(2, waits=True, reason=Reason.INFRASTRUCTURE, time=5.0)
    outcome = outcome_of(hang(0, waits=True), hang(1, waits=True), woken, world_size=3)
    assert outcome.report.endswith(
        "; rank 2 saw no hang and then lost the others, perhaps after being stuck; ranks 0, 1 waited for others"
    )


def test_ranks_that_all_wait_blame_no_other():
    outcome = outcome_of(hang(0, waits=True), hang(1, waits=True), world_size=2)
    assert outcome.report.endswith("; every rank waited for others")


def test_ranks_that_hang_alike_are_named_together():
    outcome = outcome_of(*(hang(rank, waits=False, time=rank) for rank in range(12)), world_size=12)
    assert "rank 0 on n0 hangs" in outcome.report
    assert "; also hanging: ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more\n" in outcome.report


def test_a_rank_that_raised_is_the_cause_of_the_others_hang():
    raised = hang(1, waits=False, time=9.0, reason=Reason.FAILED)
    assert outcome_of(hang(0, waits=True), raised, world_size=2).reason is Reason.FAILED

import pytest

from hpctrain.attempt.outcome import conclude, judge
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
    outcome = judge(records(record(0), record(1)), 2, 0)
    assert (outcome.reason, outcome.exit_code, outcome.report) == (Reason.COMPLETED, ExitCode.FINISHED, "")


def test_the_rank_that_failed_is_named_and_not_those_that_lost_it():
    lost = record(0, Reason.INFRASTRUCTURE, message="Connection closed by peer", blames_peer=True, time=1.0)
    failed = record(1, Reason.FAILED, message="ValueError: no", traceback="Traceback: here", time=2.0)
    outcome = judge(records(lost, failed), 2, 0)
    assert outcome.reason is Reason.FAILED
    assert outcome.exit_code == ExitCode.FAILED
    assert "rank 1 on n1" in outcome.report
    assert "Traceback: here" in outcome.report


def test_a_rank_that_died_without_a_word_is_the_cause_of_its_peers_errors():
    lost = record(0, Reason.INFRASTRUCTURE, message="Connection closed by peer", blames_peer=True)
    outcome = judge(records(lost), 2, 5)
    assert outcome.reason is Reason.INFRASTRUCTURE
    assert "rank 1 of 2" in outcome.report
    assert outcome.step == 7


def test_interrupted_ranks_are_resumable():
    outcome = judge(records(record(0, Reason.INTERRUPTED), record(1, Reason.INTERRUPTED)), 2, 0)
    assert outcome.exit_code == ExitCode.INTERRUPTED


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory.at(tmp_path / "run")
    directory.create(0o750)
    return directory


def test_an_attempt_without_a_single_record_gets_its_start_and_its_end(run):
    ledger = Ledger(run)
    attempt = ledger.claim()
    conclude(run, attempt, 2)
    (entry,) = ledger.attempts()
    assert (entry.attempt, entry.reason, entry.world_size, entry.start_step) == (1, Reason.INFRASTRUCTURE, 2, 0)


def test_an_end_that_rank_zero_recorded_stands(run):
    ledger = Ledger(run)
    attempt = ledger.claim()
    ledger.start(attempt, job_id="1", nodes=["n1"], world_size=1, step=0)
    ledger.end(attempt, reason=Reason.COMPLETED, step=9)
    record(0, step=9).write(run.claim(attempt))
    conclude(run, attempt, 1)
    assert [entry.reason for entry in ledger.attempts()] == [Reason.COMPLETED]
    assert len(run.attempts.read_text().splitlines()) == 2

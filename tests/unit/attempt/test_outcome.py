"""How an attempt ended, from its ranks' exit records."""

import signal

import pytest

from hpctrain.attempt.outcome import Outcome, record_end, train_further_command
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
    assert train_further_command(run, outcome.headline) == f"{command} '~callbacks.early_stopping'"
    assert train_further_command(run, "trainer.max_time_min=5: over") == f"{command} trainer.max_time_min=MINUTES"


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
    record(0, step=9).write(run.attempt(attempt))
    record_end(run, attempt, Outcome.of_attempt(run, attempt, 1), world_size=1)
    assert [entry.reason for entry in ledger.attempts()] == [Reason.COMPLETED]
    assert len(run.attempts.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("entry", "reason", "report"),
    [
        (record(0, Reason.INTERRUPTED), Reason.CANCELLED, "stopped after step 7"),
        (record(0, Reason.CANCELLED), Reason.CANCELLED, "stopped after step 7"),
        (None, Reason.CANCELLED, "cancelled by its user; infrastructure: rank 0 of 1 ended without"),
        (record(0, Reason.HANG, message="no step for 60 s"), Reason.CANCELLED, "cancelled by its user; hang: rank 0"),
        (record(0), Reason.COMPLETED, ""),
        (record(0, Reason.FAILED, message="ValueError: no"), Reason.FAILED, "rank 0 on n0, after step 7: ValueError"),
    ],
)
def test_a_cancelled_attempt_and_not_the_one_after_it(run, entry, reason, report):
    ledger = Ledger(run)
    for attempt in (ledger.claim(), ledger.claim()):
        if entry is not None:
            entry.write(run.attempt(attempt))
    run.stop_file(1).touch()
    found = [Outcome.of_attempt(run, attempt, 1) for attempt in (1, 2)]
    assert found[0].reason is reason
    assert found[0].report.startswith(report)
    assert (found[1].reason is Reason.CANCELLED) == (entry is not None and entry.reason is Reason.CANCELLED)
    record_end(run, 1, Outcome.from_records({} if entry is None else {0: entry}, 1, 0), world_size=1)
    assert ledger.attempt(1).reason is reason


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
        "; rank 2 reported no hang, then lost the other ranks, and may have been stuck; ranks 0, 1 waited for others"
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


def of_program(*found, world_size=2, last_step=0, complaints=""):
    return Outcome.from_records(records(*found), world_size, last_step, complaints, independent=True)


STOPPED = {"reason": Reason.INTERRUPTED, "step": 0, "stop_signal": int(signal.SIGTERM)}


def test_a_program_that_is_done_on_one_rank_is_completed_whatever_stopped_the_others():
    outcome = of_program(record(0, done=True), record(1, **STOPPED))
    assert outcome.reason is Reason.COMPLETED
    assert of_program(record(0), record(1, **STOPPED)).reason is Reason.INTERRUPTED
    assert of_program(record(0, done=True)).reason is Reason.INFRASTRUCTURE  # rank 1 was killed
    failed = record(1, Reason.FAILED, message="exit code 7: ValueError: no")
    assert of_program(record(0, done=True), failed).reason is Reason.FAILED


def test_a_rank_of_a_program_that_stopped_does_not_explain_one_that_was_killed():
    outcome = of_program(record(0, **STOPPED))
    assert (outcome.reason, outcome.silent_ranks) == (Reason.INFRASTRUCTURE, (1,))


def test_what_stopped_a_program_is_passed_on_for_slurms_answer():
    warned = {**STOPPED, "stop_signal": int(signal.SIGUSR2), "message": "after the stop: exit code 1"}
    outcome = of_program(record(0, **STOPPED), record(1, **warned))
    assert (outcome.reason, outcome.stop_signal) == (Reason.INTERRUPTED, signal.SIGUSR2)
    assert outcome.report == "stopped (after the stop: exit code 1)"
    by_itself = record(0, Reason.TIME_LIMIT, step=12)
    assert of_program(by_itself, world_size=1).report == "stopped after step 12"
    assert of_program(by_itself, world_size=1).reason is Reason.TIME_LIMIT


def test_a_step_that_no_program_reported_is_not_named():
    failed = record(0, Reason.FAILED, step=0, message="exit code 7: ValueError: no")
    assert of_program(failed, world_size=1).report == "rank 0 on n0: exit code 7: ValueError: no"
    reported = record(0, Reason.FAILED, step=3, message="exit code 7")
    assert of_program(reported, world_size=1).report == "rank 0 on n0, after step 3: exit code 7"


def test_a_program_that_died_of_a_signal_accuses_no_node():
    died = record(0, Reason.INFRASTRUCTURE, step=0, message="killed by SIGSEGV, without any output")
    assert of_program(died, world_size=1).suspect_rank is None
    broken = record(0, Reason.INFRASTRUCTURE, step=0, message="exit code 1: CUDA error: uncorrectable ECC error")
    assert of_program(broken, world_size=1).suspect_rank == 0
    killed = record(0, Reason.INFRASTRUCTURE, step=0, message="killed by SIGKILL: epoch 3")
    oom = "slurmstepd: error: Detected 1 oom-kill event(s)"
    assert of_program(killed, world_size=1, complaints=oom).reason is Reason.OUT_OF_MEMORY
    assert of_program(killed, world_size=1).reason is Reason.INFRASTRUCTURE


def test_an_exit_code_after_a_stop_that_is_to_be_believed_is_not_doubted(run):
    failed = record(0, Reason.FAILED, message="exit code 3", stop_signal=int(signal.SIGTERM))
    assert not of_program(failed, world_size=1).may_be_slurms_doing(Ledger(run), 1)
    assert Outcome.from_records(records(failed), 1, 0).may_be_slurms_doing(Ledger(run), 1)


def test_that_a_run_is_a_programs_is_read_from_its_configuration(run):
    attempt = Ledger(run).claim()
    record(0, **STOPPED).write(run.attempt(attempt))
    assert Outcome.of_attempt(run, attempt, 2).reason is Reason.INTERRUPTED
    run.config.write_text("name: long\nrun: {command: [bash, long.sh]}\n")
    assert Outcome.of_attempt(run, attempt, 2).reason is Reason.INFRASTRUCTURE


NODES = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}


@pytest.mark.parametrize(
    ("silent", "nodes", "suspects"),
    [
        ((), NODES, ()),
        ((3,), NODES, ("n2",)),
        ((2, 3), NODES, ("n2",)),
        ((0, 2), NODES, ()),  # on all nodes, so none is more suspect
        ((2, 3), {0: "n2", 1: "n2", 2: "n1", 3: "n1"}, ("n1",)),
        ((2, 3), {0: "n1", 1: "n1", 2: "n2"}, ()),
        ((2, 3), {}, ()),
    ],
)
def test_silent_ranks_point_at_the_nodes_where_they_began(silent, nodes, suspects):
    outcome = Outcome(Reason.INFRASTRUCTURE, 3, "two lines\nof a report", silent_ranks=silent)
    outcome_with_suspects = outcome.with_suspects(nodes, num_nodes=2)
    assert outcome_with_suspects.suspects == suspects
    unknown = bool(nodes) and bool(set(silent) - set(nodes))
    assert outcome_with_suspects.report == outcome.report.replace(
        "\n", "; no start record names the node of rank 3\n" if unknown else "\n"
    )


def test_a_rank_that_reports_a_broken_machine_points_at_its_node():
    outcome = Outcome(Reason.INFRASTRUCTURE, 3, "ECC error", suspect_rank=0, silent_ranks=(1, 2, 3))
    assert outcome.with_suspects({0: "n2", 1: "n1"}, num_nodes=2).suspects == ("n2",)
    assert outcome.with_suspects({0: "n2"}, num_nodes=1).suspects == ("n2",)


def test_several_unknown_nodes_are_reported_together():
    outcome = Outcome(Reason.INFRASTRUCTURE, 0, "lost", silent_ranks=(1, 2))
    assert outcome.with_suspects({0: "n1"}, num_nodes=3).report == (
        "lost; no start record names the node of ranks 1, 2"
    )
    assert outcome.with_suspects({0: "n1"}, num_nodes=1).report == "lost"

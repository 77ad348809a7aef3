"""What the supervisor notifies of: starts, requeues and ends, none of which waits for a command that hangs."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from hpctrain.attempt.notification import KILLED_S, SOON_S
from hpctrain.errors import ExitCode
from tests.unit.fakes import Step
from tests.unit.supervising import COMPLETES, KILLED, STOPS, all_ranks, ends

PREEMPTED = ends("preempted", 14)
HANGS = ("notify.command='sleep 600'", "notify.timeout_s=600")


@pytest.fixture
def seen(tmp_path):
    """What the command of `records` got: the event and the message of each notification, in order."""

    def read():
        found = [json.loads(path.read_text()) for path in tmp_path.glob("seen/*")]
        return [(one["event"], one["message"]) for one in sorted(found, key=lambda one: one["time"])]

    return read


@pytest.fixture
def records(tmp_path):
    """A command that keeps what it gets."""
    (tmp_path / "seen").mkdir()
    return f"notify.command='cat > {tmp_path}/seen/$$'"


def test_a_run_that_is_restarted_and_completes(slurm, supervisor, records, seen):
    slurm.plan(KILLED, replace(COMPLETES, start=10))
    assert supervisor(records).run() == ExitCode.FINISHED
    started, interrupted, completed = seen()
    assert started == ("started", "attempt 1 starts on n1 n2")
    assert interrupted[0] == "interrupted"
    assert interrupted[1].startswith("infrastructure after step 10: ranks 0, 1 of 2 ended without an exit record")
    assert interrupted[1].endswith("; new ranks start in the same job")
    assert completed == ("completed", "completed after step 80")


def test_a_requeue(slurm, supervisor, records, seen):
    slurm.plan(PREEMPTED)
    one = supervisor(records)
    assert one.run() == ExitCode.INTERRUPTED
    assert seen()[1:] == [("interrupted", "preempted after step 14; job 7 is requeued")]
    slurm.plan(replace(COMPLETES, start=14), first=2)
    assert supervisor(records, SLURM_RESTART_COUNT="1").run() == ExitCode.FINISHED
    assert [event for event, _ in seen()] == ["started", "interrupted", "started", "completed"]
    assert seen()[2][1] == "attempt 2 starts on n1 n2 after step 14; attempt 1 ended as preempted"


def test_a_new_job_is_named(slurm, supervisor, records, seen):
    slurm.plan(PREEMPTED)
    slurm.refuse_requeues()
    assert supervisor(records).run() == ExitCode.INTERRUPTED
    assert seen()[1] == ("interrupted", "preempted after step 14; the run continues in job 8")


def test_a_run_that_nothing_continues(slurm, supervisor, records, seen):
    slurm.plan(PREEMPTED)
    slurm.refuse_requeues()
    one = supervisor(records, submitted=False)
    assert one.run() == ExitCode.INTERRUPTED
    event, message = seen()[1]
    assert event == "interrupted"
    assert message.startswith("preempted after step 14: it can't be continued automatically; the run ends here")
    assert message.endswith(f"to resume: python -m hpctrain resume {one.directory.path}")


def test_a_budget_that_is_spent_is_named(slurm, supervisor, records, seen):
    slurm.plan(PREEMPTED)
    assert supervisor(records, "cluster.requeue.max_preemptions=0").run() == ExitCode.INTERRUPTED
    event, message = seen()[1]
    assert event == "interrupted"
    assert "preempted 1 time, and cluster.requeue.max_preemptions=0 allows no more; the run ends here" in message


def test_a_run_that_failed(slurm, supervisor, records, seen):
    slurm.plan(Step(start=0, exits=all_ranks("failed", 3, message="ValueError: no")))
    assert supervisor(records).run() == ExitCode.FAILED
    event, message = seen()[1]
    assert event == "failed"
    assert "ValueError: no; the run ends here; once the cause is fixed" in message


def test_a_run_that_its_user_cancelled_while_it_was_stopping(slurm, supervisor, records, seen):
    slurm.plan(replace(PREEMPTED, job=STOPS["cancelled"]))
    assert supervisor(records).run() == ExitCode.CANCELLED
    assert seen()[1][0] == "cancelled"


def test_a_run_directory_that_is_lost(slurm, supervisor, records, seen, unwritable):
    one = supervisor(records, storage_s=0.0, SLURM_RESTART_COUNT="1")
    unwritable()
    assert one.run() == ExitCode.INTERRUPTED
    ((event, message),) = seen()
    assert event == "interrupted"
    assert message.endswith("; job 7 is requeued")


def test_a_command_that_hangs_delays_a_requeued_job_by_seconds(slurm, supervisor):
    """The requeue itself is not delayed at all: the job, or the next one, waits for the nodes."""
    slurm.plan(PREEMPTED)
    one = supervisor(*HANGS)
    began = time.monotonic()
    assert one.run() == ExitCode.INTERRUPTED
    assert slurm.requeued == ["7"]
    requeued = (slurm.home / "requeued").stat().st_mtime
    assert time.time() - requeued > SOON_S - 1, "the command was waited for before the requeue"
    assert time.monotonic() - began < 60 + SOON_S + KILLED_S


def test_a_command_that_hangs_delays_no_restart(slurm, supervisor, caplog):
    slurm.plan(KILLED, replace(COMPLETES, start=10))
    one = supervisor("notify.command='sleep 600'", "notify.timeout_s=1")
    assert one.run() == ExitCode.FINISHED
    assert one.ledger.attempts()[-1].reason == "completed"
    log = [record for record in caplog.records if "notify.command took more than" in record.getMessage()]
    assert len(log) == 3
    assert one.directory.notify_log.exists()


def test_the_end_waits_for_its_command(slurm, supervisor, tmp_path):
    """SLURM kills what is left of a job when its batch script ends."""
    slurm.plan(COMPLETES)
    assert supervisor(f"notify.command='sleep {SOON_S + 1}; cat > {tmp_path}/end'", "notify.on=[completed]").run() == 0
    assert json.loads((tmp_path / "end").read_text())["event"] == "completed"


def test_a_job_with_more_runs_to_train_waits_for_no_command(slurm, supervisor):
    slurm.plan(COMPLETES)
    one = supervisor(*HANGS, "notify.on=[completed]", shares_job=True)
    began = time.monotonic()
    assert one.run() == ExitCode.FINISHED
    assert time.monotonic() - began < 60

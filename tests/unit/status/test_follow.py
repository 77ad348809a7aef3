from __future__ import annotations

import threading

import pytest

from hpctrain.errors import ExitCode
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.status import follow
from hpctrain.status.follow import wait_for


@pytest.fixture
def submitted(directory, slurm, monkeypatch):
    """A run whose job 12 runs, with what an attempt before it printed."""
    monkeypatch.setattr(follow, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(follow, "ASK_SOON_S", 0.02)
    monkeypatch.setattr(follow, "SETTLE_S", 0.1)
    monkeypatch.setattr(follow, "LATE_RECORD_S", 0.5)
    directory.config.write_text("name: digits\n")
    directory.rank_log(0).write_text("an earlier attempt\n")
    directory.record_job({"job_id": "12", "time": 1.0, "log": str(directory.logs / "batch_12.log")})
    slurm.queue(j12={"State": "PENDING", "Reason": "Licenses"})
    return directory


def begin(directory, job_id="12"):
    ledger = Ledger(directory)
    number = ledger.claim()
    ledger.start(number, job_id=job_id, nodes=["n1", "n2"], world_size=2, step=0)
    with directory.rank_log(0).open("a") as log:
        log.write(f"attempt {number}\n")
    return number


def script(*acts):
    """Do one thing after another, half a second apart, in the background."""

    def run():
        for act in acts:
            threading.Event().wait(0.5)
            act()

    threading.Thread(target=run, daemon=True).start()


def waited(directory, capfd):
    code = wait_for(directory, skip_bytes=len("an earlier attempt\n"))
    return code, capfd.readouterr().out.splitlines()


def test_a_run_is_followed_from_the_queue_to_its_end(submitted, slurm, capfd):
    def start():
        begin(submitted)
        slurm.queue(j12={"State": "RUNNING"})

    def end():
        Ledger(submitted).end(1, reason=Reason.COMPLETED, step=40)

    script(start, end, lambda: slurm.queue(j12={"State": "COMPLETED"}))
    code, lines = waited(submitted, capfd)
    assert code is ExitCode.FINISHED
    assert lines[0] == "hpctrain: the run is queued (it waits for a license (Licenses))"
    assert lines[-1] == f"hpctrain: completed at step 40; run directory {submitted.path}"
    assert lines.count("attempt 1") == lines.count("hpctrain: the run is running on n1 n2") == 1
    assert "an earlier attempt" not in lines


def test_an_attempt_that_another_one_follows_is_not_the_end(submitted, slurm, capfd, monkeypatch):
    begin(submitted)
    slurm.queue(j12={"State": "RUNNING"})

    def preempt():
        Ledger(submitted).end(1, reason=Reason.PREEMPTED, step=10, next="requeue")
        slurm.queue(j12={"State": "PREEMPTED"})

    def restart():
        begin(submitted)
        slurm.queue(j12={"State": "RUNNING"})

    def fail():
        Ledger(submitted).end(2, reason=Reason.FAILED, step=20, detail="rank 1 on n2 failed")
        slurm.queue(j12={"State": "FAILED"})

    monkeypatch.setattr(follow, "LATE_RECORD_S", 30.0)
    script(preempt, restart, fail)
    code, lines = waited(submitted, capfd)
    assert code is ExitCode.FAILED
    assert [line for line in lines if line.startswith("attempt")] == ["attempt 1", "attempt 2"]
    assert lines[-3:] == [
        f"hpctrain: failed at step 20; run directory {submitted.path}",
        "hpctrain: rank 1 on n2 failed",
        f"hpctrain: to resume: python -m hpctrain resume {submitted.as_typed}",
    ]


def test_a_cancelled_job_that_recorded_no_end(submitted, slurm, capfd):
    script(lambda: slurm.queue(j12={"State": "CANCELLED"}))
    code, lines = waited(submitted, capfd)
    assert code is ExitCode.CANCELLED
    assert lines[-1].startswith("hpctrain: the run was cancelled; to resume: ")


def test_a_job_that_ended_without_a_record(submitted, slurm, capfd):
    begin(submitted)
    script(lambda: slurm.queue(j12={"State": "NODE_FAIL"}))
    code, lines = waited(submitted, capfd)
    assert code is ExitCode.FAILED
    note = "job 12 ended as NODE_FAIL, and attempt 1 recorded no end"
    assert lines[-1] == f"hpctrain: the run is interrupted ({note}); see {submitted.logs / 'batch_12.log'}"


def test_while_slurm_is_silent_the_run_is_not_over(submitted, slurm, capfd, monkeypatch):
    begin(submitted)
    Ledger(submitted).end(1, reason=Reason.FAILED, step=3)
    monkeypatch.setattr(follow, "ASK_EVERY_S", 0.2)
    slurm.fall_silent("squeue", times=6)

    def answer():
        begin(submitted)
        Ledger(submitted).end(2, reason=Reason.COMPLETED, step=40)
        slurm.queue(j12={"State": "COMPLETED"})

    script(answer)
    assert waited(submitted, capfd)[0] is ExitCode.FINISHED

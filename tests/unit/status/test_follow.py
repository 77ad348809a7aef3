from __future__ import annotations

import time

import pytest

from hpctrain.errors import ExitCode
from hpctrain.run.job_records import JobRecords
from hpctrain.run.ledger import EndFacts, Ledger
from hpctrain.run.reason import Reason
from hpctrain.status import follow
from hpctrain.status.follow import wait_for
from hpctrain.status.jobs import SETUP_ERROR


class ScriptedTime:
    """In place of the module `time`: it passes only while the follower sleeps.

    Attributes:
        acts: what happens, one thing every five seconds.
    """

    def __init__(self):
        self.acts = []
        self._now_s = 100.0
        self._next_act_s = 105.0

    def monotonic(self):
        return self._now_s

    def sleep(self, seconds):
        self._now_s += seconds
        if self._now_s >= self._next_act_s and self.acts:
            self.acts.pop(0)()
            self._next_act_s += 5
        assert self._now_s < 300, "the follower doesn't see the end"


@pytest.fixture
def script(monkeypatch):
    """Set what happens while a run is followed."""
    scripted = ScriptedTime()
    monkeypatch.setattr(follow, "time", scripted)
    return lambda *acts: scripted.acts.extend(acts)


@pytest.fixture
def submitted(directory, slurm):
    """A run whose job 12 is queued, with what an attempt before it printed."""
    directory.config.write_text("name: digits\n")
    directory.rank_log(0).write_text("an earlier attempt\n")
    JobRecords(directory).add({"job_id": "12", "time": 1.0, "log": str(directory.logs / "batch_12.log")})
    slurm.queue(j12={"State": "PENDING", "Reason": "Licenses"})
    return directory


def begin(directory, job_id="12"):
    ledger = Ledger(directory)
    number = ledger.claim()
    ledger.start(number, job_id=job_id, nodes=["n1", "n2"], world_size=2, step=0)
    with directory.rank_log(0).open("a") as log:
        log.write(f"attempt {number}\n")
    return number


def waited(directory, capfd):
    code = wait_for(directory, skip_bytes=len("an earlier attempt\n"))
    return code, capfd.readouterr().out.splitlines()


def test_a_run_is_followed_from_the_queue_to_its_end(submitted, slurm, script, capfd):
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


def test_an_attempt_that_another_one_follows_is_not_the_end(submitted, slurm, script, capfd):
    begin(submitted)
    slurm.queue(j12={"State": "RUNNING"})

    def preempt():
        Ledger(submitted).end(1, EndFacts(next="requeue"), reason=Reason.PREEMPTED, step=10)
        slurm.queue(j12={"State": "PREEMPTED"})

    def restart():
        begin(submitted)
        slurm.queue(j12={"State": "RUNNING"})

    def fail():
        Ledger(submitted).end(2, reason=Reason.FAILED, step=20, detail="rank 1 on n2 failed")
        slurm.queue(j12={"State": "FAILED"})

    script(preempt, restart, fail)
    code, lines = waited(submitted, capfd)
    assert code is ExitCode.FAILED
    assert [line for line in lines if line.startswith("attempt")] == ["attempt 1", "attempt 2"]
    assert lines[-3:] == [
        f"hpctrain: failed at step 20; run directory {submitted.path}",
        "hpctrain: rank 1 on n2 failed",
        f"hpctrain: once the cause is fixed, resume with: python -m hpctrain resume {submitted.as_typed}",
    ]


def test_a_cancelled_job_that_recorded_no_end(submitted, slurm, script, capfd):
    script(lambda: slurm.queue(j12={"State": "CANCELLED"}))
    code, lines = waited(submitted, capfd)
    assert code is ExitCode.CANCELLED
    assert lines[-1].startswith("hpctrain: the run was cancelled; to resume: ")


def test_a_job_that_ended_without_a_record(submitted, slurm, script, capfd):
    begin(submitted)
    (submitted.logs / "batch_12.log").touch()
    script(lambda: slurm.queue(j12={"State": "NODE_FAIL"}))
    code, lines = waited(submitted, capfd)
    assert code is ExitCode.FAILED
    note = "job 12 ended as NODE_FAIL, and attempt 1 recorded no end"
    assert lines[-1] == f"hpctrain: the run is interrupted ({note}); see {submitted.logs / 'batch_12.log'}"


@pytest.mark.parametrize("reason", [Reason.TIME_LIMIT, Reason.COMPLETED])
def test_a_resume_whose_job_began_no_attempt_ends_with_that_job_s_error(submitted, slurm, script, capfd, reason):
    begin(submitted)
    Ledger(submitted).end(1, reason=reason, step=10)
    log = submitted.logs / "batch_13.log"
    JobRecords(submitted).add({"job_id": "13", "time": time.time() + 1.0, "log": str(log)})
    slurm.queue(j12={"State": "TIMEOUT"}, j13={"State": "PENDING", "Reason": "Licenses"})

    def fail():
        log.write_text(f"{SETUP_ERROR}module load cuda (exit code 1)\n")
        slurm.queue(j12={"State": "TIMEOUT"}, j13={"State": "FAILED"})

    script(fail)
    code, lines = waited(submitted, capfd)
    assert code is ExitCode.FAILED
    note = "job 13 ended before an attempt began; a line of cluster.setup failed: module load cuda (exit code 1)"
    assert lines[-1] == f"hpctrain: the run is failed ({note}); see {log}"


def test_while_slurm_is_silent_the_run_is_not_over(submitted, slurm, script, capfd):
    begin(submitted)
    Ledger(submitted).end(1, reason=Reason.FAILED, step=3)
    slurm.fall_silent("squeue", times=6)

    def answer():
        begin(submitted)
        Ledger(submitted).end(2, reason=Reason.COMPLETED, step=40)
        slurm.queue(j12={"State": "COMPLETED"})

    script(answer)
    assert waited(submitted, capfd)[0] is ExitCode.FINISHED


def test_a_held_job_is_reported_once_with_what_releases_it(submitted, slurm, script, capsys):
    held = {"State": "PENDING", "Reason": "JobHeldUser", "PriorityLong": "0"}
    script(
        lambda: slurm.queue(j12=held),
        lambda: None,
        lambda: None,
        lambda: slurm.queue(j12={"State": "CANCELLED"}),
    )
    wait_for(submitted)
    out = capsys.readouterr().out
    assert out.count("the run is held (its user holds it; type `scontrol release 12` (JobHeldUser))\n") == 1

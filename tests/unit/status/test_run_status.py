from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import sys

import pytest

from hpctrain.attempt.outcome import Outcome, record_end
from hpctrain.metrics.sink import JsonLinesSink
from hpctrain.run.checkpoint_manifest import MANIFEST
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.job_records import JobRecords
from hpctrain.run.ledger import EndFacts, Ledger, StartFacts
from hpctrain.run.reason import Reason
from hpctrain.run.start_record import UnconnectedRanks
from hpctrain.scheduler.job import JobState, SlurmJob
from hpctrain.status.jobs import SETUP_ERROR, job_ids
from hpctrain.status.run_status import read_status
from hpctrain.status.state import RunState
from hpctrain.streams import LostOutput
from tests.unit.fakes import manifest
from tests.unit.runs_before import end_attempt, run_before


def job(state, reason="", **fields):
    return SlurmJob(job_id="12", number=12, state=JobState(state), reason=reason, **fields)


@pytest.fixture
def directory(tmp_path):
    directory = RunDirectory.at(tmp_path / "runs" / "digits" / "now")
    directory.create(0o750)
    directory.config.write_text("name: digits\ntrainer:\n  max_steps: 460\n  max_epochs: null\n")
    return directory


def test_a_run_that_was_only_submitted(directory):
    JobRecords(directory).add({"job_id": "12", "time": 1.0, "log": "x"})
    status = read_status(directory, {"12": job("PENDING", "Licenses", start_time=99)})
    assert (status.state, status.note, status.may_start) == (RunState.QUEUED, "it waits for a license (Licenses)", 99)
    assert (status.name, status.step, status.total_steps, status.job_ids) == ("digits", 0, 460, ("12",))
    assert (status.metrics, status.checkpoint_step, status.attempts) == ({}, None, ())


def test_a_queued_run_names_the_runs_for_which_it_waits(directory, tmp_path):
    other = run_before(tmp_path / "other", job_id="11")
    directory.config.write_text(f"name: digits\nafter:\n- {other.path}\n")
    records = JobRecords(directory)
    records.add({"job_id": "12", "time": 1.0})
    waits = f"it waits for {other.path} to complete"
    assert read_status(directory, {"12": job("PENDING", "Dependency")}).note == f"{waits} (Dependency)"
    assert read_status(directory, {"12": job("PENDING", "BeginTime")}).note == f"{waits} (BeginTime)"
    assert "it waits for nodes" in read_status(directory, {"12": job("PENDING", "Resources")}).note
    # once it has begun, a requeued job waits for nothing else, unless it has looked again
    end_attempt(directory, "preempted", "12")
    assert "its earliest start time" in read_status(directory, {"12": job("PENDING", "BeginTime")}).note
    records.wait("12")
    assert read_status(directory, {"12": job("PENDING", "BeginTime")}).note == f"{waits} (BeginTime)"
    end_attempt(other, "completed", "11")
    assert (
        read_status(directory, {"12": job("PENDING", "Dependency")}).note
        == "it waits for another job to end (Dependency)"
    )


def test_time_in_the_queue_counts_from_the_submission_and_not_from_a_wait(directory):
    JobRecords(directory).add({"job_id": "12", "time": 100.0})
    JobRecords(directory).add({"job_id": "12", "time": 900.0, "waited": True})
    ledger = Ledger(directory, clock=lambda: 1000.0)
    ledger.claim()
    ledger.start(1, job_id="12", nodes=["n1"], world_size=1, step=0)
    spent = read_status(directory, {"12": job("RUNNING")}).account.attempts[0].spent
    assert spent.queued_s == 900.0


def test_a_run_in_its_second_attempt(directory):
    ledger = Ledger(directory, clock=lambda: 500.0)
    JobRecords(directory).add({"job_id": "12", "time": 1.0})
    ledger.claim()
    ledger.start(1, job_id="12", nodes=["n1"], world_size=1, step=0)
    ledger.end(1, reason=Reason.PREEMPTED, step=140)
    ledger.claim()
    ledger.start(2, job_id="12", nodes=["n2"], world_size=1, step=140)
    directory.checkpoint(140).mkdir()
    (directory.checkpoint(140) / MANIFEST).write_bytes(manifest(140))
    assert read_status(directory, {"12": job("RUNNING")}).step == 140
    sink = JsonLinesSink(directory.metrics, 140, clock=lambda: 510.0)
    sink.log(150, {"train/loss": 0.5, "eval/accuracy": 0.875})
    sink.log(160, {"train/loss": math.inf})
    sink.flush()
    status = read_status(directory, {"12": job("RUNNING")})
    assert (status.state, status.step, status.checkpoint_step) == (RunState.RUNNING, 160, 140)
    assert status.metrics == {"train/loss": math.inf, "eval/accuracy": 0.875}
    assert status.metrics_time == 510.0
    assert [attempt.reason for attempt in status.attempts] == [Reason.PREEMPTED, None]
    sink.log(170, {"train/loss": 0.25})
    sink.close()
    assert read_status(directory, None).metrics["train/loss"] == 0.25


def test_the_ledger_decides_the_last_step_of_an_ended_attempt(directory):
    ledger = Ledger(directory)
    ledger.claim()
    ledger.start(1, StartFacts(total_steps=230), job_id=None, nodes=["n1"], world_size=1, step=0)
    directory.metrics.write_text('{"step": 90, "time": 1}\n')
    ledger.end(1, reason=Reason.FAILED, step=93)
    status = read_status(directory, None)
    assert (status.step, status.total_steps, status.state) == (93, 230, RunState.FAILED)


def test_a_local_run_whose_process_was_killed_is_not_running(directory):
    program = """
import json, os, socket, sys, time
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger

directory = RunDirectory.at(sys.argv[1])
ledger = Ledger(directory)
claim = directory.attempt(ledger.claim())
(claim / "owner.json").write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
print("claimed", flush=True)
sys.stdin.readline()
ledger.start(1, job_id=None, nodes=["here"], world_size=1, step=0)
print("begun", flush=True)
time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(directory.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        process.stdout.readline()
        assert read_status(directory, None).state == RunState.STARTING
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        assert read_status(directory, None).state == RunState.RUNNING
        process.kill()
    status = read_status(directory, None)
    assert status.state == RunState.INTERRUPTED
    gone = f"process {process.pid} on {socket.gethostname()} is gone and recorded no end"
    assert status.note == f"{gone}: it was killed, or it crashed"


def test_a_job_cancelled_in_the_queue_that_slurm_forgot(directory):
    JobRecords(directory).add({"job_id": "12", "time": 1.0})
    JobRecords(directory).add({"cancelled": True, "time": 2.0})
    assert read_status(directory, {"12": None}).state == RunState.CANCELLED
    JobRecords(directory).add({"job_id": "13", "time": 3.0})
    assert read_status(directory, {"12": None, "13": job("PENDING")}).state == RunState.QUEUED


def test_a_whole_array_is_not_this_runs_job(directory):
    JobRecords(directory).add({"job_id": "12_3", "time": 1.0})
    ledger = Ledger(directory)
    for attempt, job_id in enumerate(["12", "12_3", "40"], start=1):
        ledger.start(attempt, job_id=job_id, nodes=[], world_size=1, step=0)
    assert job_ids(directory) == ["12_3", "40"]


def test_only_the_tail_of_long_metrics_is_read(directory):
    record = json.dumps({"step": 0, "time": 0.0, "eval/loss": 9.0, "padding": "x" * 200_000})
    directory.metrics.write_text(record + '\n{"step": 3, "time": 1.5, "train/loss": 2}\n{"step": 4, "ti')
    status = read_status(directory, None)
    assert (status.step, status.metrics) == (3, {"train/loss": 2})


@pytest.mark.parametrize("config", ["", "[1", "text", "trainer: null\n", "name: null\ntrainer: {max_steps: null}\n"])
def test_an_unreadable_configuration_leaves_the_rest(directory, config):
    directory.config.write_text(config)
    status = read_status(directory, None)
    assert (status.name, status.total_steps, status.state) == ("now", None, RunState.PREPARED)


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "hpctrain: error: too early\nhpctrain: error: the run is gone\nmore\n",
            "; the run is gone",
        ),
        ("no error of ours\n", ""),
        (None, "; it wrote no log: if its node can't see .*/logs, put that on a file system that all nodes share"),
    ],
)
def test_a_job_that_ended_before_an_attempt_began_has_the_error_of_its_log(directory, log, reason):
    path = directory.logs / "batch_12.log"
    JobRecords(directory).add({"job_id": "12", "time": 1.0, "log": str(path)})
    if log is not None:
        path.write_text(log)
    status = read_status(directory, {"12": job("FAILED")})
    assert re.fullmatch(f"job 12 ended as FAILED, and no attempt began{reason}", status.note)


STARTED = "2026-11-25 10:00:00,123 attempt 1 on n1\n"


@pytest.mark.parametrize("requeued", ["by hpctrain", "by SLURM", "never"])
@pytest.mark.parametrize("known", [True, False])
def test_a_job_that_ended_at_a_line_of_its_setup_has_failed(directory, requeued, known):
    log, ledger = directory.logs / "batch_12.log", Ledger(directory)
    JobRecords(directory).add({"job_id": "12", "time": 1.0, "log": str(log)})
    before = ""
    if requeued != "never":
        ledger.start(ledger.claim(), job_id="12", nodes=["n1"], world_size=1, step=0)
        before = STARTED
    if requeued == "by hpctrain":
        ledger.end(1, EndFacts(next="requeue"), reason=Reason.PREEMPTED, step=3)
    log.write_text(f"{before}{SETUP_ERROR}module load cuda (exit code 1)\n")
    status = read_status(directory, {"12": job("FAILED") if known else None})
    why = "a line of cluster.setup failed: module load cuda (exit code 1)"
    assert (status.state, status.note) == (RunState.FAILED, f"job 12 ended before an attempt began; {why}")
    assert status.unstarted
    assert read_status(directory, {"12": job("PENDING")}).state is RunState.QUEUED


def test_a_line_that_failed_before_a_later_attempt_is_not_its_end(directory):
    log, ledger = directory.logs / "batch_12.log", Ledger(directory)
    JobRecords(directory).add({"job_id": "12", "time": 1.0, "log": str(log)})
    ledger.start(ledger.claim(), job_id="12", nodes=["n1"], world_size=1, step=0)
    ledger.end(1, EndFacts(next="requeue"), reason=Reason.PREEMPTED, step=3)
    log.write_text(f"{SETUP_ERROR}module load cuda (exit code 1)\n{STARTED}")
    assert read_status(directory, {"12": job("FAILED")}).state is RunState.INTERRUPTED


def test_nothing_heavy_is_imported():
    program = """
import sys
import hpctrain.status.run_status
print(sorted({"torch", "numpy", "omegaconf", "hydra", "submitit"} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_logs_that_lack_lines_and_ranks_that_have_not_connected_are_named(directory):
    directory.config.write_text("name: one\nrun:\n  command: [x]\n")
    ledger = Ledger(directory)
    UnconnectedRanks(count=2, unit="rank").write(directory.attempt(ledger.claim()))
    ledger.start(1, job_id=None, nodes=["n1"], world_size=2, step=0)
    unconnected = "rank 1 has not connected to rank 0, so each may be training its own model"
    assert read_status(directory, None).note.endswith(unconnected)
    record = ExitRecord(rank=1, host="n1", reason=Reason.COMPLETED, step=0, lost_lines=3, lost_bytes=70)
    record.write(directory.attempt(1))
    lost = {0: LostOutput(0, 5), 1: LostOutput(1, 10), 2: LostOutput()}
    record_end(directory, 1, Outcome(Reason.COMPLETED, 0), lost, world_size=2)
    incomplete = "logs/rank_0.log lacks 1 line (5 bytes), logs/rank_1.log lacks 4 lines (80 bytes)"
    status = read_status(directory, None)
    assert (status.state, status.note) == (RunState.COMPLETED, f"{incomplete}; {unconnected}")
    UnconnectedRanks.withdraw(directory.attempt(1))
    assert read_status(directory, None).note == incomplete

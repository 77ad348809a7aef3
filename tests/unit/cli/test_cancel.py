from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys

import pytest

from hpctrain.cli.cancel import main
from hpctrain.errors import RunDirectoryError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.job_records import JobRecords
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.status.run_status import read_statuses
from hpctrain.status.state import RunState

TRAINING = """
import json, os, signal, socket, sys, threading
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason

stop = threading.Event()
signal.signal(signal.SIGINT, lambda *_: stop.set())
directory = RunDirectory.at(sys.argv[1])
ledger = Ledger(directory)
number = ledger.claim()
(directory.attempt(number) / "owner.json").write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
ledger.start(number, job_id=None, nodes=["here"], world_size=1, step=0)
print("running", flush=True)
stop.wait(60)
ledger.end(number, reason=Reason.INTERRUPTED, step=12)
"""


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(name):
        directory = RunDirectory.at(f"runs/{name}")
        directory.create(0o750)
        directory.config.touch()
        return directory

    return make


def state(directory):
    return read_statuses([directory])[0].state


def own(directory, host, pid):
    number = Ledger(directory).claim()
    (directory.attempt(number) / "owner.json").write_text(json.dumps({"host": host, "pid": pid}))
    Ledger(directory).start(number, job_id=None, nodes=[host], world_size=1, step=0)
    return number


def test_a_run_on_this_machine_stops_as_by_ctrl_c(make_run, capsys):
    directory = make_run("digits")
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(directory.path), "hpctrain"], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "running\n"
        assert state(directory) == RunState.RUNNING
        assert main(["digits"]) == 0
        assert process.wait(60) == 0
    assert directory.is_cancelled(1)
    asked = f"asked process {process.pid} to stop after its current step and save"
    assert capsys.readouterr().out == f"runs/digits: {asked}\n"
    assert Ledger(directory).attempts()[0].reason == Reason.INTERRUPTED
    assert state(directory) == RunState.CANCELLED
    assert main(["digits"]) == 0
    assert capsys.readouterr().out == "runs/digits: nothing to cancel: the run is cancelled\n"


def test_a_process_that_is_not_the_runs_gets_no_signal(make_run, capsys):
    directory = make_run("digits")
    sleep = shutil.which("sleep")
    with subprocess.Popen([sleep, "60"]) as process:
        own(directory, socket.gethostname(), process.pid)
        assert main(["digits"]) == 1
        assert process.poll() is None
        process.kill()
    error = capsys.readouterr().err
    assert f"process {process.pid} should be the run's, but it is `{sleep} 60`: no signal was sent" in error


def test_a_program_that_trains_gets_no_signal_that_could_end_it(make_run, capsys):
    directory = make_run("digits")
    with subprocess.Popen(["sleep", "60"]) as process:
        number = own(directory, socket.gethostname(), process.pid)
        owner = {"host": socket.gethostname(), "pid": process.pid, "in_program": True}
        (directory.attempt(number) / "owner.json").write_text(json.dumps(owner))
        assert main(["digits"]) == 0
        assert directory.is_cancelled(number)
        assert process.poll() is None
        process.kill()
    asked = f"asked process {process.pid} to stop after its current step and save"
    assert capsys.readouterr().out == f"runs/digits: {asked}\n"


def test_a_run_on_another_machine_is_asked_by_a_file(make_run, capsys, monkeypatch):
    directory = make_run("digits")
    number = own(directory, "another-host", 1)
    for again in ("", " once more"):
        assert main(["digits"]) == 0
        asked = f"asked process 1 on another-host{again} to stop after its current step and save"
        assert capsys.readouterr().out == f"runs/digits: {asked}\n"
    assert directory.is_cancelled(number)
    assert state(directory) is RunState.UNKNOWN  # it may still be running
    Ledger(directory).claim()
    assert not directory.is_cancelled(number + 1)


def test_a_run_on_another_machine_cannot_be_asked_on_a_full_disk(make_run, capsys, monkeypatch):
    directory = make_run("digits")
    number = own(directory, "another-host", 1)
    monkeypatch.setattr("hpctrain.launch.cancellation.write_json", full)
    assert main(["digits"]) == 1
    problem = f"the stop file {directory.stop_file(number)} can't be written (No space left on device)"
    assert capsys.readouterr().err == f"hpctrain: error: runs/digits: {problem}\n"
    assert not directory.jobs.exists()


def test_a_run_that_is_over_stays_as_it_is(make_run, capsys):
    directory = make_run("digits")
    number = own(directory, socket.gethostname(), os.getpid())
    Ledger(directory).end(number, reason=Reason.COMPLETED, step=460)
    before = directory.attempts.read_bytes()
    assert main(["digits"]) == 0
    assert capsys.readouterr().out == "runs/digits: nothing to cancel: the run is completed\n"
    assert directory.attempts.read_bytes() == before
    assert not directory.jobs.exists()


def test_names_are_looked_up_before_anything_is_cancelled(make_run, slurm):
    directory = make_run("digits")
    slurm.queue(j12={"State": "RUNNING"})
    JobRecords(directory).add({"job_id": "12", "time": 1.0})
    with pytest.raises(RunDirectoryError, match="absent: no such path"):
        main(["digits", "absent"])
    assert slurm.cancelled == []


def test_a_queued_and_a_running_job_are_cancelled(make_run, slurm, capsys):
    queued, running = make_run("queued"), make_run("running")
    for directory, job_id in ((queued, "12"), (running, "13")):
        JobRecords(directory).add({"job_id": job_id, "time": 1.0})
    slurm.queue(j12={"State": "PENDING", "Reason": "Resources"}, j13={"State": "RUNNING"})
    assert main(["queued", "running"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "runs/queued: cancelled job 12, which was pending",
        "runs/running: cancelled job 13, which was running",
    ]
    assert slurm.cancelled == ["12 13"]
    assert [state(directory) for directory in (queued, running)] == [RunState.CANCELLED] * 2
    slurm.queue()
    assert state(queued) == RunState.CANCELLED  # also when SLURM has forgotten it


def test_of_an_array_only_the_runs_own_tasks_are_cancelled(make_run, slurm, capsys):
    for task in range(3):
        JobRecords(make_run(f"sweep/{task}")).add({"job_id": f"20_{task}", "time": 1.0})
    Ledger(make_run("sweep/1")).start(1, job_id="20", nodes=["n1"], world_size=1, step=0)
    slurm.queue(**{f"j20_{task}": {"State": "PENDING"} for task in range(3)}, j20={"State": "RUNNING"})
    assert main(["sweep/1"]) == 0
    assert slurm.cancelled == ["20_1"]
    assert main(["sweep"]) == 0
    one, others = slurm.cancelled
    assert (one, set(others.split())) == ("20_1", {"20_0", "20_2"})
    assert "runs/sweep/1: nothing to cancel: the run is cancelled" in capsys.readouterr().out


def test_every_job_of_a_run_that_is_still_there_is_cancelled(make_run, slurm):
    directory = make_run("digits")
    for job_id in ("12", "15", "16"):
        JobRecords(directory).add({"job_id": job_id, "time": 1.0})
    slurm.queue(j12={"State": "FAILED"}, j15={"State": "COMPLETING"}, j16={"State": "PENDING"})
    assert main(["digits"]) == 0
    assert slurm.cancelled == ["15 16"]


def test_a_thousand_runs_are_cancelled_in_ten_calls(make_run, slurm, capsys):
    for task in range(1000):
        JobRecords(make_run(f"sweep/{task}")).add({"job_id": f"20_{task}", "time": 1.0})
    slurm.queue(**{f"j20_{task}": {"State": "PENDING"} for task in range(1000)})
    assert main(["sweep"]) == 0
    assert [len(call.split()) for call in slurm.cancelled] == [100] * 10
    assert len(set(" ".join(slurm.cancelled).split())) == 1000
    assert capsys.readouterr().out.count("which was pending") == 1000


def test_a_task_of_a_search_between_two_runs_is_cancelled_last(make_run, slurm, capsys):
    home = make_run("S")
    home.config.unlink()
    home.sweep.write_text("{}")
    for task in ("30_0", "30_1"):
        JobRecords(home).add({"job_id": task, "time": 1.0})
    JobRecords(make_run("S/0")).add({"job_id": "30_1", "time": 1.0})
    slurm.queue(j30_0={"State": "RUNNING"}, j30_1={"State": "RUNNING"})
    assert main(["S"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "runs/S/0: cancelled job 30_1, which was running",
        "runs/S: cancelled 1 task between two runs",
    ]
    assert slurm.cancelled == ["30_1", "30_0"]


@pytest.mark.usefixtures("no_slurm")
def test_without_slurm_a_job_cannot_be_cancelled(make_run, capsys):
    directory = make_run("digits")
    JobRecords(directory).add({"job_id": "12", "time": 1.0})
    assert main(["digits"]) == 1
    assert (
        "SLURM can't be reached from here to cancel job 12; run the command on a login node" in capsys.readouterr().err
    )
    assert len(JobRecords(directory).read()) == 1


def test_the_cancellation_is_recorded_before_slurm_cancels(make_run, slurm):
    """SLURM's record of a job that is being preempted doesn't show the supervisor who ended it."""
    directory = make_run("digits")
    JobRecords(directory).add({"job_id": "12", "time": 1.0})
    slurm.queue(j12={"State": "RUNNING"})
    slurm.watch(directory.jobs)
    assert main(["digits"]) == 0
    assert '"cancelled": true' in slurm.watched


def test_a_cancellation_that_slurm_refused_is_revoked(make_run, slurm, capsys):
    directory = make_run("digits")
    JobRecords(directory).add({"job_id": "12", "time": 1.0})
    slurm.queue(j12={"State": "RUNNING"})
    slurm.fall_silent("scancel")
    assert main(["digits"]) == 1
    assert "Unable to contact" in capsys.readouterr().err
    assert not JobRecords(directory).read()[-1]["cancelled"]


def test_a_job_is_cancelled_on_a_full_disk(make_run, slurm, monkeypatch):
    directory = make_run("digits")
    JobRecords(directory).add({"job_id": "12", "time": 1.0})
    slurm.queue(j12={"State": "RUNNING"})
    monkeypatch.setattr(JobRecords, "add", full)
    assert main(["digits"]) == 0
    assert slurm.cancelled == ["12"]


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_run_that_cannot_be_cancelled_does_not_keep_the_others(make_run, slurm, capsys):
    sleep = shutil.which("sleep")
    JobRecords(make_run("queued")).add({"job_id": "12", "time": 1.0})
    slurm.queue(j12={"State": "PENDING"})
    with subprocess.Popen([sleep, "60"]) as process:
        own(make_run("others"), socket.gethostname(), process.pid)
        assert main(["others", "queued"]) == 1
        process.kill()
    out, err = capsys.readouterr()
    assert out == "runs/queued: cancelled job 12, which was pending\n"
    assert "should be the run's" in err


def test_a_sweep_on_this_machine_begins_no_further_run(make_run, capsys):
    home = make_run("S")
    home.config.unlink()
    home.sweep.write_text("{}")
    make_run("S/0")
    assert main(["S/0"]) == 0
    assert not home.sweep_stop_file.exists()
    assert main(["S"]) == 0
    assert home.sweep_stop_file.exists()
    assert capsys.readouterr().out.splitlines()[1:] == [
        "runs/S: no further run begins",
        "runs/S/0: nothing to cancel: the run is prepared",
    ]

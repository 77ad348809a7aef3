from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from hpctrain.cli.logs import main
from hpctrain.errors import RunDirectoryError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.job_records import JobRecords
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory.at("runs/digits/now")
    directory.create(0o750)
    directory.config.touch()
    return directory


def begin(directory, **start):
    """An attempt that this process runs."""
    ledger = Ledger(directory)
    number = ledger.claim()
    owner = {"host": socket.gethostname(), "pid": os.getpid()}
    (directory.attempt(number) / "owner.json").write_text(json.dumps(owner))
    ledger.start(number, job_id=None, nodes=["here"], world_size=1, step=0)
    return number


def append(path, text):
    with path.open("a") as file:
        file.write(text)


@pytest.fixture
def follow(directory):
    """The command as its users start it; ended at the end of the test if need be."""
    started = []

    def start(*more):
        command = [sys.executable, "-m", "hpctrain", "logs", "digits", "--follow", *more]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_rank_zero_is_shown(directory, capfdbinary):
    append(directory.rank_log(0), "first\nsecond\n")
    append(directory.rank_log(1), "of rank one\n")
    assert main(["digits"]) == 0
    assert capfdbinary.readouterr().out == b"first\nsecond\n"


def test_a_rank_and_the_last_lines_can_be_asked_for(directory, capfdbinary):
    append(directory.rank_log(3), "a\nb\nc\n")
    assert main(["digits", "--rank", "3", "--lines", "2"]) == 0
    assert capfdbinary.readouterr().out == b"b\nc\n"


def test_bytes_that_are_not_text_are_copied_as_they_are(directory, capfdbinary):
    directory.rank_log(0).write_bytes(b"\xff\x00\r\x1b[K")
    main(["digits"])
    assert capfdbinary.readouterr().out == b"\xff\x00\r\x1b[K"


def test_a_rank_without_a_log_is_an_error_that_names_the_others(directory):
    for rank in (0, 10, 2):
        directory.rank_log(rank).touch()
    with pytest.raises(RunDirectoryError, match="--rank 7: this rank has no log; there are logs of ranks 0, 2, 10"):
        main(["digits", "--rank", "7"])


def test_a_rank_that_printed_nothing_is_no_error(directory, capfdbinary):
    append(directory.rank_log(0), "of rank zero\n")
    directory.rank_log(1).touch()
    assert main(["digits", "--rank", "1"]) == 0
    out, err = capfdbinary.readouterr()
    assert (out, err) == (b"", b"hpctrain: rank 1 has printed nothing\n")


def test_before_the_ranks_print_the_batch_script_is_shown(directory, capfdbinary):
    old, new = directory.logs / "batch_11.log", directory.logs / "batch_12.log"
    append(old, "old\n")
    append(new, "srun: error\n")
    for job_id, log in (("11", old), ("12", new), ("13", directory.logs / "batch_13.log")):
        JobRecords(directory).add({"job_id": job_id, "time": 1.0, "log": str(log)})
    directory.rank_log(0).touch()
    assert main(["digits"]) == 0
    out, err = capfdbinary.readouterr()
    assert out == b"srun: error\n"
    assert b"no rank has printed anything yet; this is the batch script's log" in err


def test_without_any_log_the_state_is_shown(directory, capfdbinary):
    assert main(["digits"]) == 0
    out, err = capfdbinary.readouterr()
    assert (out, err) == (
        b"",
        b"hpctrain: nothing was printed yet: the run is prepared (it has not been started yet)\n",
    )


def test_a_queued_run_shows_why_it_waits(directory, slurm, capfdbinary):
    JobRecords(directory).add({"job_id": "12", "time": 1.0, "log": str(directory.logs / "batch_12.log")})
    slurm.queue(j12={"State": "PENDING", "Reason": "Resources"})
    assert main(["digits"]) == 0
    assert capfdbinary.readouterr().err.startswith(b"hpctrain: nothing was printed yet: the run is queued (")


@pytest.mark.parametrize("option", ["--lines", "--rank"])
def test_negative_numbers_are_refused(directory, option, capsys):
    with pytest.raises(SystemExit):
        main(["digits", option, "-1"])
    assert "can't be negative" in capsys.readouterr().err


def test_following_goes_over_attempts_and_cut_logs_to_the_end(directory, follow):
    log, ledger = directory.rank_log(0), Ledger(directory)
    number = begin(directory)
    process = follow()
    assert process.stderr.readline() == "hpctrain: the run is running on here\n"
    append(log, "one\n")
    assert process.stdout.readline() == "one\n"
    before, number = number, begin(directory)
    ledger.end(before, reason=Reason.INTERRUPTED, step=10)
    append(log, "two, lo")
    append(log, "nger\n")
    assert process.stdout.readline() == "two, longer\n"
    log.write_text("cut\n")
    assert process.stdout.readline() == "cut\n"
    append(log, "last\n")
    ledger.end(number, reason=Reason.COMPLETED, step=460)
    out, err = process.communicate(timeout=60)
    assert (out, err) == ("last\n", "hpctrain: the run is completed, at step 460\n")
    assert process.returncode == 0


def test_following_turns_from_the_batch_script_to_the_rank(directory, follow):
    number = begin(directory)
    batch_log = directory.logs / "batch_12.log"
    append(batch_log, "attempt 1 on n1\n")
    JobRecords(directory).add({"job_id": None, "time": 1.0, "log": str(batch_log)})
    process = follow()
    assert process.stdout.readline() == "attempt 1 on n1\n"
    append(directory.rank_log(0), "step 10\n")
    assert process.stdout.readline() == "step 10\n"
    Ledger(directory).end(number, reason=Reason.FAILED, step=10, detail="rank 0 failed")
    _, err = process.communicate(timeout=60)
    assert err.splitlines()[-1] == "hpctrain: the run is failed (rank 0 failed), at step 10"


def test_following_a_queued_run_that_is_cancelled(directory, slurm, follow):
    JobRecords(directory).add({"job_id": "12", "time": 1.0, "log": str(directory.logs / "batch_12.log")})
    slurm.queue(j12={"State": "PENDING", "Reason": "Resources"})
    process = follow()
    assert process.stderr.readline().startswith("hpctrain: the run is queued (")
    asked = len(slurm.questions)
    slurm.queue()
    JobRecords(directory).add({"job_id": "13", "time": 2.0})  # a new job is a reason to ask at once
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("", 0)
    assert err == "hpctrain: the run is interrupted (SLURM no longer knows job 13, and no attempt began), at step 0\n"
    assert asked == 1
    assert len(slurm.questions) <= 8


def test_a_run_that_is_over_is_shown_and_left(directory, follow):
    number = begin(directory)
    append(directory.rank_log(0), "a\nb\nc\n")
    Ledger(directory).end(number, reason=Reason.COMPLETED, step=3)
    begun = time.monotonic()
    out, _ = follow("--lines", "1").communicate(timeout=60)
    assert out == "c\n"
    assert time.monotonic() - begun < 30


def test_ctrl_c_ends_the_following_quietly(directory, follow):
    begin(directory)
    append(directory.rank_log(0), "one\n")
    process = follow()
    assert process.stdout.readline() == "one\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == ("", "", 0)


def test_a_closed_pipe_is_no_error(directory):
    append(directory.rank_log(0), "line\n" * 100_000)
    command = f"{sys.executable} -m hpctrain logs digits | head -n 1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert (result.stdout, result.stderr) == ("line\n", "")

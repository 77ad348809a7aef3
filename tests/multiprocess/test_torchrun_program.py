"""torchrun as the program of a run, once per node: its ranks' reports, errors and saves reach the run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import read_exit_records
from hpctrain.run.reason import Reason
from hpctrain.run.saves import last_save
from tests.support.fork_server import clean_environment

PROGRAM = Path(__file__).parent / "programs" / "torchrun_ddp.py"


def launch(folder, *arguments):
    command = [sys.executable, "-m", "hpctrain", "run", "run_dir=run", "run.processes=node"]
    command += ["cluster.processes_per_node=2", "code.snapshot=none", "--"]
    command += [sys.executable, "-m", "torch.distributed.run", str(PROGRAM), *arguments]
    environ = clean_environment() | {"PYTHONWARNINGS": "default"}
    return subprocess.Popen(command, cwd=folder, env=environ), RunDirectory.at(folder / "run")


def steps(directory):
    lines = directory.metrics.read_text().splitlines() if directory.metrics.exists() else []
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.nightly
def test_its_ranks_report_to_the_run(tmp_path):
    process, directory = launch(tmp_path, "6")
    assert process.wait(timeout=120) == 0
    assert steps(directory) == [1, 2, 3, 4, 5, 6]
    record = read_exit_records(directory.attempt(1))[0]
    assert (record.reason, record.done, record.step) == (Reason.COMPLETED, True, 6)


@pytest.mark.nightly
def test_the_error_of_one_rank_is_the_cause(tmp_path):
    process, directory = launch(tmp_path, "20", "fails")
    assert process.wait(timeout=120) == 1
    record = read_exit_records(directory.attempt(1))[0]
    assert (record.reason, record.message) == (Reason.FAILED, "exit code 1: ValueError: bad sample")


@pytest.mark.nightly
def test_a_stop_reaches_its_ranks(tmp_path):
    process, directory = launch(tmp_path, "4000")
    deadline = time.monotonic() + 100
    while not steps(directory) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 4
    record = read_exit_records(directory.attempt(1))[0]
    assert record.reason is Reason.INTERRUPTED
    assert last_save(directory).step == record.step > 0

"""Drills on this machine: of trainings that are exact, and of one that isn't."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger

TASKS = """
import time

from hpctrain.tasks.digits import Digits


class Slow(Digits):
    def loss(self, model, batch):
        time.sleep(0.03)
        return super().loss(model, batch)


class Counting(Digits):
    calls = 0

    def loss(self, model, batch):
        time.sleep(0.03)
        self.calls += 1  # lost with the process: that is what resuming can't know of
        return super().loss(model, batch) * (1 + self.calls / 1000)


class Failing(Digits):
    def loss(self, model, batch):
        raise ValueError("no luck today")
"""
"""Below, seeds that interrupt early: however late a stop is noticed, there are steps left."""
FOREIGN = ("SLURM", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "HPCTRAIN")


@pytest.fixture
def drill(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(TASKS)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    command = [sys.executable, "-m", "hpctrain", "drill", "run_dir=here"]

    def start(*words):
        return subprocess.Popen(
            [*command, *words], env=environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def run(*words):
        with start(*words, "--json") as process:
            output, progress = process.communicate(timeout=280)
        assert output, progress.decode()
        return process.returncode, json.loads(output), progress.decode()

    run.start = start
    return run


def own(task):
    return ["task=custom", f"task._target_=own.{task}"]


def attempts():
    found = Ledger(RunDirectory.at("here/interrupted")).attempts()
    return [(entry.start_step, str(entry.reason), entry.end_step) for entry in found]


@pytest.mark.nightly  # the gate has the drill on SLURM
def test_one_process(drill):
    code, report, progress = drill(*own("Slow"), "--interruptions", "2", "--seed", "42", "trainer.max_steps=100")
    assert code == 0, progress
    assert report["exact"]
    first, second = (one["step"] for one in report["interruptions"])
    assert second > 20  # the first evaluation
    assert attempts() == [(0, "interrupted", first), (first, "interrupted", second), (second, "completed", 100)]
    compared = {row["what"]: row["straight"] for row in report["compared"]}
    assert compared["steps"] == "100"
    assert compared["train/loss"].endswith("100 values")
    assert compared["eval/accuracy"].endswith("5 values")
    assert compared["samples by rank"] == "of 100 steps"
    assert Ledger(RunDirectory.at("here/straight")).last_claim() == 1


@pytest.mark.nightly
def test_two_processes(drill):
    words = ("cluster.processes_per_node=2", "--interruptions", "1", "--seed", "52", "--remove")
    code, report, progress = drill(*own("Slow"), *words)
    assert code == 0, progress
    assert len(report["interruptions"]) == 1
    assert not Path("here").exists()


@pytest.mark.nightly  # the gate compares differing runs in tests/unit/drill
def test_what_a_task_keeps_to_itself_is_found_out(drill):
    code, report, _ = drill(*own("Counting"), "--interruptions", "1", "trainer.max_steps=100", "--seed", "17")
    assert code == 1
    (interruption,) = report["interruptions"]
    differing = {row["what"]: row["difference"] for row in report["compared"] if not row["equal"]}
    assert differing.keys() >= {"weights digest", "train/loss"}
    assert differing["train/loss"].startswith(f"first after step {interruption['step'] + 1}: ")
    assert {"steps", "samples by rank", "train/lr"}.isdisjoint(differing)


def test_a_training_that_fails_says_why(drill):
    with drill.start(*own("Failing")) as process:
        output, error = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "ValueError: no luck today" in error.decode()


def test_ctrl_c_ends_the_training_too(drill):
    with drill.start(*own("Slow"), "trainer.max_steps=100000") as process:
        metrics, deadline = Path("here/straight/metrics.jsonl"), time.monotonic() + 60
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 4, error.decode()
    (attempt,) = Ledger(RunDirectory.at("here/straight")).attempts()
    assert str(attempt.reason) == "interrupted"
    deadline = time.monotonic() + 15
    while left := [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(Path.cwd()).encode() in read(path)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""

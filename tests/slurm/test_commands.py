"""status, logs, cancel, inspect and resume on jobs of a real SLURM."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmSandbox

    Hpctrain = Callable[..., subprocess.CompletedProcess[str]]

SUBMIT = ["cluster=slurm", "nodes=2", "logger.tensorboard=false", "cluster.cpus_per_process=1"]
SUBMIT += ["task=custom", "task._target_=own.Slow", "model=convnet"]
TASK = """
import time

from hpctrain.tasks.digits import Digits


class Slow(Digits):
    def loss(self, model, batch):
        time.sleep(0.05)  # the processors are needed elsewhere while the test asks about the run
        return super().loss(model, batch)
"""


@pytest.fixture
def hpctrain(sandbox: SlurmSandbox, tmp_path: Path) -> Hpctrain:
    """Type `python -m hpctrain ...` and wait for it."""
    (tmp_path / "own.py").write_text(TASK)
    return lambda *words: sandbox.run([sys.executable, "-m", "hpctrain", *words], cwd=tmp_path, timeout=280)


@pytest.fixture
def status(hpctrain: Hpctrain) -> Callable[[str], dict[str, Any]]:
    """`status RUN --json`."""

    def ask(run: str) -> dict[str, Any]:
        printed: dict[str, Any] = json.loads(hpctrain("status", run, "--json").stdout)
        return printed

    return ask


def wait_until(ready: Callable[[], object], timeout: float = 200) -> None:
    deadline = time.monotonic() + timeout
    while not ready():
        assert time.monotonic() < deadline, f"not so after {timeout:g} s"
        time.sleep(0.1)


def test_a_run_from_the_queue_to_its_end_and_on(
    sandbox: SlurmSandbox, hpctrain: Hpctrain, status: Callable[[str], dict[str, Any]]
) -> None:
    endless = ["trainer.max_steps=1000000", "trainer.max_epochs=null", "cluster.time_limit_min=9"]
    (first,) = hpctrain(*SUBMIT, *endless, "run_dir=runs/mine/first").stdout.splitlines()[:1]
    job = first.removeprefix("submitted job ")
    sandbox.wait_job(job, "RUNNING")
    whole = ["nodes=4", "+cluster.sbatch.exclusive=true", "run_dir=runs/mine/second"]
    assert hpctrain(*SUBMIT, *whole).returncode == 0

    with ThreadPoolExecutor() as pool:
        followed = pool.submit(hpctrain, "logs", "mine/first", "--follow")
        check_queued(hpctrain, status)
        check_running(hpctrain, status, job)
        cancelled = hpctrain("cancel", "mine")
        assert cancelled.returncode == 0, cancelled.stderr
        assert f"runs/mine/first: cancelled job {job}, which was running" in cancelled.stdout
        assert ", which was pending" in cancelled.stdout
        log = followed.result()
        assert "step 10/1000000" in log.stdout
        assert "the run is cancelled" in log.stderr
    assert [status(f"mine/{name}")["state"] for name in ("first", "second")] == ["cancelled", "cancelled"]
    again = hpctrain("cancel", "mine/first")
    assert again.stdout == "runs/mine/first: nothing to cancel: the run is cancelled\n"
    check_resumed(hpctrain, status)


def check_queued(hpctrain: Hpctrain, status: Callable[[str], dict[str, Any]]) -> None:
    wait_until(lambda: status("mine/second")["may_start"])
    queued = status("mine/second")
    assert (queued["state"], queued["step"], queued["attempts"]) == ("queued", 0, [])
    assert "it waits for nodes to become free" in queued["note"]
    assert "Resources" in queued["note"]
    assert 0 < queued["may_start"] - time.time() <= 9 * 60
    shown = hpctrain("status", "mine/second").stdout
    assert "by SLURM's estimate" in shown
    assert "cancel runs/mine/second" in shown
    refused = hpctrain("resume", "runs/mine/second")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "is queued; end it first" in refused.stderr


def check_running(hpctrain: Hpctrain, status: Callable[[str], dict[str, Any]], job: str) -> None:
    wait_until(lambda: status("mine/first")["step"] >= 20)
    running = status("mine/first")
    assert (running["state"], running["job_ids"], running["total_steps"]) == ("running", [job], 1_000_000)
    assert running["attempts"][0]["nodes"] == ["n1", "n2"]
    assert running["metrics"]["train/loss"] > 0
    refused = hpctrain(*SUBMIT, "run_dir=runs/mine/first", "trainer.max_steps=1000000", "trainer.max_epochs=null")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "is running; end it first" in refused.stderr
    table = [line.split()[:2] for line in hpctrain("status").stdout.splitlines()]
    assert table[1:] == [["mine/second", "queued"], ["mine/first", "running"]]


def check_resumed(hpctrain: Hpctrain, status: Callable[[str], dict[str, Any]]) -> None:
    stopped = status("mine/first")
    saved = json.loads(hpctrain("inspect", "mine/first", "--json").stdout)
    assert saved["step"] == stopped["step"] == stopped["checkpoint_step"] > 0
    end = stopped["step"] + 5
    shorter = [f"trainer.max_steps={end}", "resume.allow_config_change=true"]
    resumed = hpctrain("resume", "runs/mine/first", *shorter, "cluster.wait=true")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"resuming at step {stopped['step']}" in resumed.stdout
    assert "step 10/1000000" not in resumed.stdout, "the log of the first attempt was seen before"
    completed = status("mine/first")
    assert (completed["state"], completed["step"], len(completed["job_ids"])) == ("completed", end, 2)
    assert [attempt["reason"] for attempt in completed["attempts"]] == ["cancelled", "completed"]
    assert completed["attempts"][1]["start_step"] == stopped["step"]
    assert f"step {end}/{end}" in hpctrain("logs", "mine/first", "--lines", "8").stdout

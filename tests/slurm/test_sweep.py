"""Sweeps on a real SLURM: arrays of runs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmSandbox

    Hpctrain = Callable[..., subprocess.CompletedProcess[str]]

QUICK = ["cluster=slurm", "logger.tensorboard=false", "cluster.cpus_per_process=1", "trainer.max_steps=5"]

TASKS = """
from hpctrain.tasks.digits import Digits


class Fails(Digits):
    def __init__(self, fails):
        if fails:
            raise ValueError("printed to fail")
        super().__init__()
"""


@pytest.fixture
def hpctrain(sandbox: SlurmSandbox, tmp_path: Path) -> Hpctrain:
    """Type `python -m hpctrain ...` and wait for it."""
    (tmp_path / "own.py").write_text(TASKS)
    return lambda *words: sandbox.run([sys.executable, "-m", "hpctrain", *words], cwd=tmp_path, timeout=280)


def ledger(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]


def job_ids(sweep: Path) -> list[str]:
    """Of the runs, in their order."""
    lines = [(run / "jobs.jsonl").read_text().splitlines()[0] for run in sorted(sweep.glob("[0-9]"))]
    return [json.loads(line)["job_id"] for line in lines]


@pytest.mark.nightly
def test_a_sweep_is_one_array_of_runs_with_directories_of_their_own(
    sandbox: SlurmSandbox, hpctrain: Hpctrain, tmp_path: Path
) -> None:
    done = hpctrain("-m", *QUICK, "run_dir=S", "cluster.wait=true", "optimizer.lr=1e-3,3e-4,1e-4")
    assert done.returncode == 0, done.stdout + done.stderr
    sweep = tmp_path / "S"
    ids = job_ids(sweep)
    array = ids[0].partition("_")[0]
    assert ids == [f"{array}_0", f"{array}_1", f"{array}_2"]
    assert f"submitted job array {array} with 3 runs" in done.stdout
    assert sorted(path.name for path in sweep.iterdir()) == ["0", "1", "2", "code", "logs", "sweep.json"]
    configs = [yaml.safe_load((sweep / name / "config.yaml").read_text()) for name in "012"]
    assert [config["optimizer"]["lr"] for config in configs] == [1e-3, 3e-4, 1e-4]
    for name, job in zip("012", ids, strict=True):
        start, end = ledger(sweep / name)
        assert (start["job_id"], start["world_size"], len(start["nodes"])) == (job, 1, 1)
        assert (end["reason"], end["step"]) == ("completed", 5)
        assert (sweep / "logs" / f"batch_{job}.log").exists()
    # run_mode=0750 covers what the launcher, the batch script, srun and the ranks wrote
    assert [str(path) for path in [sweep, *sweep.rglob("*")] if path.stat().st_mode & 0o027] == []
    digests = {json.loads(hpctrain("inspect", f"S/{name}", "--json").stdout)["weights_digest"] for name in "012"}
    assert len(digests) == 3

    assert "step 5/5" in hpctrain("logs", "S/2").stdout
    commands = re.findall(r"^  python -m hpctrain (.*)$", done.stdout, re.MULTILINE)
    assert [(command.split()[0], hpctrain(*shlex.split(command)).returncode) for command in commands] == [
        ("status", 0),
        ("logs", 0),
        ("cancel", 0),
    ]
    status = json.loads(hpctrain("status", "S", "--json").stdout)
    assert [(run["state"], run["job_ids"]) for run in status] == [("completed", [job]) for job in reversed(ids)]
    assert {job["JobState"] for job in map(sandbox.job, ids)} == {"COMPLETED"}


def test_resources_group_the_arrays_and_each_task_has_a_fate_of_its_own(
    sandbox: SlurmSandbox, hpctrain: Hpctrain, tmp_path: Path
) -> None:
    own = ["task=custom", "task._target_=own.Fails", "model=convnet", "+task.fails=false,true"]
    done = hpctrain("-m", *QUICK, *own, "nodes=1,2", "cluster.max_parallel_runs=1", "run_dir=S")
    assert done.returncode == 0, done.stderr
    sweep = tmp_path / "S"
    ids = job_ids(sweep)
    assert [yaml.safe_load((sweep / name / "config.yaml").read_text())["nodes"] for name in "0123"] == [1, 2, 1, 2]
    one, two = ids[0].partition("_")[0], ids[1].partition("_")[0]
    assert ids == [f"{one}_0", f"{two}_0", f"{one}_1", f"{two}_1"]
    assert f"submitted job array {one} with 2 runs\nsubmitted job array {two} with 2 runs\n" in done.stdout
    assert [sandbox.job(array)["ArrayTaskThrottle"] for array in (one, two)] == ["1", "1"]

    def states() -> list[dict[str, Any]]:
        printed: list[dict[str, Any]] = json.loads(hpctrain("status", *(f"S/{n}" for n in "0123"), "--json").stdout)
        return printed

    deadline = time.monotonic() + 60
    while "JobArrayTaskLimit" not in (last := states()[3])["note"]:
        assert time.monotonic() < deadline, last
    assert last["state"] == "queued"
    assert hpctrain("cancel", "S/3").stdout == f"S/3: cancelled job {two}_1, which was pending\n"

    sandbox.wait_job(f"{two}_0", "COMPLETED", timeout=200)
    sandbox.wait_job(f"{one}_1", "FAILED", timeout=200)
    assert [run["state"] for run in states()] == ["completed", "completed", "failed", "cancelled"]
    # a task that was cancelled in the queue has only the record of its array on SLURM 26.05
    assert [sandbox.job(job)["JobState"] for job in (*ids[:3], two)] == [
        "COMPLETED",
        "COMPLETED",
        "FAILED",
        "CANCELLED",
    ]
    assert not (sweep / "3" / "attempts.jsonl").exists()
    assert "ValueError: printed to fail" in hpctrain("logs", "S/2").stdout


@pytest.mark.nightly  # the gate has it in tests/unit/sweep
def test_resume_of_a_sweep_submits_what_is_missing_as_an_array(
    sandbox: SlurmSandbox, hpctrain: Hpctrain, tmp_path: Path
) -> None:
    own = ["task=custom", "task._target_=own.Fails", "model=convnet"]
    done = hpctrain("-m", *QUICK, *own, "+task.fails=true,false", "seed=0,1", "run_dir=S", "cluster.wait=true")
    assert done.returncode == 1, done.stdout + done.stderr
    (tmp_path / "own.py").write_text(TASKS.replace("if fails:", "if False:"))
    done = hpctrain("resume", "S", "--code=now", "--retry-failed")
    assert done.returncode == 0, done.stdout + done.stderr
    (array,) = re.findall(r"^submitted job array (\d+) with 2 runs$", done.stdout, re.MULTILINE)
    assert f"  {tmp_path}/S/0  task.fails=true seed=0\n  {tmp_path}/S/1  task.fails=true seed=1\n" in done.stdout
    assert done.stdout.startswith("S/2: already completed, at step 5\nS/3: already completed, at step 5\n")
    for task in range(2):
        sandbox.wait_job(f"{array}_{task}", "COMPLETED", timeout=200)
    assert [len(ledger(tmp_path / "S" / name)) for name in "0123"] == [4, 4, 2, 2]


@pytest.mark.nightly
@pytest.mark.sandbox("--max-array-size=3")
def test_a_sweep_larger_than_an_array_is_several_and_shares_its_limit(
    sandbox: SlurmSandbox, hpctrain: Hpctrain, tmp_path: Path
) -> None:
    done = hpctrain("-m", *QUICK, "run_dir=S", "cluster.wait=true", "seed=range(0,7)", "cluster.max_parallel_runs=4")
    assert done.returncode == 0, done.stdout + done.stderr
    submitted = re.findall(r"^submitted job array (\d+) with (\d) runs$", done.stdout, re.MULTILINE)
    assert [count for _, count in submitted] == ["2", "2", "3"]
    assert job_ids(tmp_path / "S") == [f"{array}_{task}" for array, count in submitted for task in range(int(count))]
    assert [sandbox.job(array)["ArrayTaskThrottle"] for array, _ in submitted] == ["1", "1", "2"]
    assert [ledger(tmp_path / "S" / name)[-1]["reason"] for name in "0123456"] == ["completed"] * 7

"""Batch scripts written by hand: the shipped ones train, survive dead ranks and stops, and fail visibly."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpctrain.launch.local import free_port, rank_variables
from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.run.directory import RunDirectory

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmSandbox
    from tests.support.fork_server import ForkServer

    Submit = Callable[..., str]

SCRIPTS = Path(__file__).parents[2] / "slurm"
HPCTRAIN = [sys.executable, "-m", "hpctrain"]
WORDS = ["task=custom", "model=convnet", "logger.tensorboard=false", "cluster.cpus_per_process=1"]

TASKS = """
import os, time
from pathlib import Path

from hpctrain.tasks.digits import Digits


class WaitsAfterThirty(Digits):
    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        while self.calls > 31 and not Path("go").exists():
            time.sleep(0.1)
        if self.calls > 31 and "SLURM_JOB_ID" in os.environ:
            time.sleep(0.1)  # the ranks agree about once a second
        return super().loss(model, batch)


class DiesOnce(Digits):
    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == 12 and os.environ["SLURM_PROCID"] == "3" and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), 9)
        return super().loss(model, batch)


class RaisesOnRankOne(Digits):
    def __init__(self):
        if os.environ["SLURM_NODEID"] == "1":
            raise ValueError("no data on this node")
        super().__init__()
"""


@pytest.fixture
def submit(sandbox: SlurmSandbox, tmp_path: Path) -> Submit:
    """Submit a script of the folder slurm/ on two nodes; returns the job id."""
    (tmp_path / "own.py").write_text(TASKS)

    def submit_script(name: str, *words: str, options: Sequence[str] = ()) -> str:
        command = ["sbatch", "--parsable", "--nodes=2", *options, str(SCRIPTS / name), *WORDS, *words]
        done = sandbox.run(command, cwd=tmp_path, env={"HPCTRAIN_PYTHON": sys.executable})
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return submit_script


def ledger(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]


def wait_until(ready: Callable[[], bool], logs: Sequence[Path], timeout: float = 200) -> None:
    deadline = time.monotonic() + timeout
    while not ready():
        assert time.monotonic() < deadline, [log.read_text() for log in logs]
        time.sleep(0.1)


@pytest.mark.nightly
def test_they_train_and_resume_after_a_requeue_as_one_uninterrupted_run(
    sandbox: SlurmSandbox, submit: Submit, fork_server: ForkServer, tmp_path: Path
) -> None:
    words = ["task._target_=own.WaitsAfterThirty", "trainer.max_steps=60", "checkpoint.every_steps=10", "name=by_hand"]
    jobs = [submit("train.sbatch", *words), submit("torchrun.sbatch", *words)]
    runs = [tmp_path / "runs" / "by_hand" / f"job_{job}" for job in jobs]
    logs = [tmp_path / f"slurm-{job}.out" for job in jobs]
    wait_until(lambda: all((run / "checkpoints" / "step_00000030" / "manifest.json").exists() for run in runs), logs)
    sandbox.ask("scancel", "--signal=USR2", jobs[1])  # near the time limit, to the steps, not to the script
    sandbox.requeue(jobs[0])
    wait_until(lambda: "DUE TO JOB REQUEUE" in logs[0].read_text(), logs)
    (tmp_path / "go").touch()

    words[0] = "task._target_=hpctrain.tasks.digits.Digits"
    port, local = free_port(), [*WORDS, *words, "run_dir=straight"]
    places = [rank_variables(rank, 2, port) for rank in range(2)]
    ranks = [fork_server.start("hpctrain.cli:main", local, folder=tmp_path, **place) for place in places]
    for done in fork_server.wait(*ranks):
        assert done.code == 0, done.output
    for job, run, log, reason in zip(jobs, runs, logs, ("preempted", "time_limit"), strict=True):
        sandbox.wait_job(job, "COMPLETED", timeout=200)
        first, stop, second, end = ledger(run)
        assert [first["job_id"], second["job_id"]] == [job, job]
        assert (first["world_size"], len(first["nodes"]), second["restart_count"]) == (2, 2, 1)
        assert stop["reason"] == reason
        assert second["step"] == stop["step"] >= 31, "what was done when the signal came is saved"
        assert (end["reason"], end["step"]) == ("completed", 60)
        printed = (run / "logs" / "rank_0.log").read_text()
        assert f"resuming at step {second['step']} from {run}/checkpoints/step_" in printed
        assert printed.count("step 60/60  eval/accuracy") == 1, "rank zero prints for all"
        assert "\x1b" not in printed, "plain lines in a log"
        assert f"attempt 2 ended at step {end['step']}; completed" in log.read_text()
    kept = [list_checkpoints(RunDirectory.at(run)) for run in (*runs, tmp_path / "straight")]
    assert len({checkpoints[-1].weights_digest for checkpoints in kept}) == 1


@pytest.mark.nightly
def test_a_dead_rank_is_replaced_in_the_same_allocation(sandbox: SlurmSandbox, submit: Submit, tmp_path: Path) -> None:
    """Two ranks on each node, in an allocation with one task per node."""
    words = ["task._target_=own.DiesOnce", "trainer.max_steps=20", "checkpoint.every_steps=5", "run_dir=run"]
    options = ["--cpus-per-task=2", "--export=ALL,PROCESSES_PER_NODE=2"]
    job = submit("torchrun.sbatch", *words, options=options)
    sandbox.wait_job(job, {"FAILED", "COMPLETED"}, timeout=200)
    printed = (tmp_path / f"slurm-{job}.out").read_text()
    first, stop, second, end = ledger(tmp_path / "run")
    assert (first["world_size"], second["world_size"]) == (4, 4), printed
    assert (stop["reason"], stop["next"], stop["saved_step"]) == ("infrastructure", "restart", second["step"])
    assert second["step"] > 0
    assert (end["reason"], end["step"]) == ("completed", 20)
    assert sandbox.job(job)["Restarts"] == "0"


@pytest.mark.nightly
def test_an_error_of_one_rank_fails_the_job(sandbox: SlurmSandbox, submit: Submit, tmp_path: Path) -> None:
    scripts = ["train.sbatch", "torchrun.sbatch"]
    jobs = [submit(script, "task._target_=own.RaisesOnRankOne", f"run_dir={script}") for script in scripts]
    for script, job in zip(scripts, jobs, strict=True):
        assert sandbox.wait_job(job, {"FAILED", "COMPLETED"}, timeout=200)["JobState"] == "FAILED"
        printed = (tmp_path / f"slurm-{job}.out").read_text()
        assert re.search(r"rank 1 on n\d(, after step| failed:)", printed)
        assert "ValueError: no data on this node" in printed
        status = json.loads(sandbox.run([*HPCTRAIN, "status", script, "--json"], cwd=tmp_path).stdout)
        assert (status["state"], status["job_ids"]) == ("failed", [job])
        assert "no data on this node" in status["note"]

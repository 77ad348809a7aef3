"""What newer versions of SLURM do differently, on whichever version the sandbox runs.

The nodes are on two switches, and n3 and n4 on the first of them. SLURM 26.05 gives those the first tasks, unless there
is one task per node, and so a cyclic distribution; the node list and SLURM_NODEID keep their order.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmSandbox

    Hpctrain = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = pytest.mark.sandbox("--switches", "--expedite")
TASK = """
import os, signal

from hpctrain.tasks.digits import Digits


class DiesOnRankOne(Digits):
    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        if os.environ["SLURM_PROCID"] == "1" and self.calls == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
"""


@pytest.fixture
def release(sandbox: SlurmSandbox) -> tuple[int, ...]:
    """Such as (26, 5)."""
    found = re.search(r"(\d+)\.(\d+)", sandbox.ask("sinfo", "--version"))
    assert found is not None
    return tuple(map(int, found.groups()))


@pytest.fixture
def in_rank_order(release: tuple[int, ...]) -> list[str]:
    """The four nodes in the order of their ranks, if each has several."""
    return ["n3", "n4", "n1", "n2"] if release >= (26, 5) else ["n1", "n2", "n3", "n4"]


@pytest.fixture
def hpctrain(sandbox: SlurmSandbox, tmp_path: Path) -> Hpctrain:
    """Type `python -m hpctrain ...` and wait for it."""

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return sandbox.run([sys.executable, "-m", "hpctrain", *words], cwd=tmp_path, timeout=280)

    return command


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.nightly
def test_ranks_in_the_order_of_the_switches_meet_and_are_blamed_by_their_nodes(
    hpctrain: Hpctrain, in_rank_order: list[str], tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(TASK)
    words = ["task=custom", "task._target_=own.DiesOnRankOne", "model=convnet", "logger.tensorboard=false"]
    job = ["cluster=slurm", "nodes=4", "cluster.processes_per_node=2", "cluster.wait=true", "run_dir=R"]
    done = hpctrain(*words, *job, "cluster.cpus_per_process=1", "cluster.requeue.max_failures=0")
    assert done.returncode == 1, done.stdout + done.stderr
    start, end = records(tmp_path / "R" / "attempts.jsonl")
    assert (start["nodes"], start["step"], end["reason"]) == (in_rank_order, 0, "infrastructure")
    assert end["suspects"] == in_rank_order[:1]
    begun = [json.loads(path.read_text()) for path in sorted((tmp_path / "R").glob("attempts/0001/start_*.json"))]
    assert [(record["rank"], record["node"]) for record in begun] == [(r, in_rank_order[r // 2]) for r in range(8)]


@pytest.mark.parametrize("per_node", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_program_gets_the_address_of_rank_zero(
    hpctrain: Hpctrain, in_rank_order: list[str], tmp_path: Path, per_node: int
) -> None:
    print_place = 'echo "place $RANK $MASTER_ADDR $(hostname)"'
    words = ["cluster=slurm", "nodes=4", f"cluster.processes_per_node={per_node}", "cluster.wait=true", "run_dir=R"]
    done = hpctrain("run", *words, "--", "bash", "-c", print_place)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = "".join(path.read_text() for path in sorted((tmp_path / "R").glob("logs/rank_*.log")))
    places = re.findall(r"^place (\d) (\S+) (\S+)$", logs, re.MULTILINE)
    nodes = in_rank_order if per_node > 1 else sorted(in_rank_order)
    assert places == [(str(rank), nodes[0], nodes[rank // per_node]) for rank in range(4 * per_node)]


@pytest.mark.nightly
@pytest.mark.parametrize("tasks", ["--ntasks=4", "--ntasks-per-node=2"])
def test_ranks_by_hand_in_the_order_of_the_switches(
    sandbox: SlurmSandbox, in_rank_order: list[str], tmp_path: Path, tasks: str
) -> None:
    words = ["logger.tensorboard=false", "trainer.max_steps=3", f"run_dir={tmp_path}/R"]
    done = sandbox.run(["srun", "-N4", tasks, sys.executable, "-m", "hpctrain", *words], cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    start, end = records(tmp_path / "R" / "attempts.jsonl")
    assert (set(start["nodes"]), end["reason"]) == (set(in_rank_order), "completed")


def test_a_failed_run_that_asked_for_an_expedited_requeue_stays_failed(
    sandbox: SlurmSandbox, hpctrain: Hpctrain, release: tuple[int, ...], tmp_path: Path
) -> None:
    """SLURM would requeue the job at any exit code but 0, and hold it where no epilog has failed."""
    if release < (25, 11):
        pytest.skip("SLURM 25.11 and later take --requeue=expedite")
    words = ["cluster=slurm", "cluster.sbatch.requeue=expedite", "cluster.wait=true", "run_dir=R", "--", "false"]
    assert hpctrain("run", *words).returncode == 1
    (job,) = {record["job_id"] for record in records(tmp_path / "R" / "jobs.jsonl")}
    assert sandbox.wait_job(job, "FAILED")["ExpeditedRequeue"] == "Yes"
    time.sleep(2)
    assert sandbox.job(job)["JobState"] == "FAILED"


def test_a_step_with_gpus_of_its_own(hpctrain: Hpctrain, tmp_path: Path) -> None:
    """Since 26.05 srun refuses --gres=gpu where the job asked for --gpus-per-node."""
    job = [
        "cluster=slurm",
        "cluster.gpus_per_node=2",
        "cluster.processes_per_node=1",
        "cluster.srun_args=['--gres=gpu:1']",
    ]
    show = 'echo "gpus $CUDA_VISIBLE_DEVICES"'
    done = hpctrain("run", *job, "cluster.wait=true", "run_dir=R", "--", "bash", "-c", show)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\ngpus 0\n" in (tmp_path / "R" / "logs" / "rank_0.log").read_text()

"""`env` on real steps: what every task derives, from what SLURM really sets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmSandbox

ENV = [sys.executable, "-c", "import sys; from hpctrain.cli.env import main; sys.exit(main(['--json']))"]


def printed(output: str) -> list[dict[str, Any]]:
    """What the tasks printed, among the lines that srun writes of its own (a step that waits for nodes, say)."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def reports(output: str) -> list[dict[str, Any]]:
    """What the tasks printed, by rank."""
    return sorted(printed(output), key=lambda report: report["environment"]["rank"])


def srun(sandbox: SlurmSandbox, *options: str, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    done = sandbox.run(["srun", *options, *ENV], env=env)
    assert done.returncode == 0, done.stderr
    return reports(done.stdout)


def places(found: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    names = ("rank", "local_rank", "node_rank", "world_size", "local_world_size", "num_nodes")
    return [tuple(report["environment"][name] for name in names) for report in found]


def script(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "job.sh"
    path.write_text("\n".join(["#!/bin/bash", "set -eu", *lines]) + "\n")
    return str(path)


def command() -> str:
    return f'{ENV[0]} -c "{ENV[2]}"'


def test_uneven_tasks(sandbox: SlurmSandbox) -> None:
    found = srun(sandbox, "-N3", "-n5")
    environments = [report["environment"] for report in found]
    world = [(e["node_rank"], e["local_rank"], e["local_world_size"]) for e in environments]
    sizes = [max(local + 1 for node, local, _ in world if node == rank) for rank in range(3)]
    assert [e["rank"] for e in environments] == [0, 1, 2, 3, 4]
    assert world == [(node, local, sizes[node]) for node in range(3) for local in range(sizes[node])]
    assert sum(sizes) == 5
    for report in found:
        environment = report["environment"]
        assert report["is_rank"]
        assert environment["source"] == "slurm"
        assert environment["nodes"][environment["node_rank"]] == report["hostname"]
        assert environment["master_addr"] == found[0]["hostname"]
        assert (environment["world_size"], environment["num_nodes"]) == (5, 3)
    assert len({tuple(e["port_candidates"]) for e in environments}) == 1


def test_cyclic_distribution(sandbox: SlurmSandbox) -> None:
    found = srun(sandbox, "-N2", "--ntasks-per-node=2", "--distribution=cyclic")
    assert places(found) == [(0, 0, 0, 4, 2, 2), (1, 0, 1, 4, 2, 2), (2, 1, 0, 4, 2, 2), (3, 1, 1, 4, 2, 2)]
    assert all(report["environment"]["master_addr"] == found[0]["hostname"] for report in found)


@pytest.mark.parametrize(
    ("asked", "visible"),
    [
        ("--gpus-per-task=1", 1),
        pytest.param("--gpus-per-node=2", 2, marks=pytest.mark.nightly),
        pytest.param("--gres=gpu:2", 2, marks=pytest.mark.nightly),
    ],
)
def test_gpus(sandbox: SlurmSandbox, asked: str, visible: int) -> None:
    found = srun(sandbox, "-N2", "--ntasks-per-node=2", asked)
    assert [report["gpus_visible"] for report in found] == [visible] * 4
    assert places(found) == [(0, 0, 0, 4, 2, 2), (1, 1, 0, 4, 2, 2), (2, 0, 1, 4, 2, 2), (3, 1, 1, 4, 2, 2)]


def test_steps_of_a_batch_script_that_is_no_rank_itself(sandbox: SlurmSandbox, tmp_path: Path) -> None:
    text = script(tmp_path, command(), f"srun -n2 {command()}", f"srun -n2 --nodelist=$SLURMD_NODENAME -N1 {command()}")
    job = sandbox.submit("-N2", "-n4", f"--output={tmp_path}/out", text)
    sandbox.wait_job(job, "COMPLETED")
    alone, *ranks = printed((tmp_path / "out").read_text())
    assert not alone["is_rank"]
    assert places([alone]) == [(0, 0, 0, 1, 1, 1)]
    assert alone["environment"]["source"] == "single"
    assert alone["environment"]["nodes"] == [alone["hostname"]]
    first, second = reports("\n".join(map(json.dumps, ranks[:2]))), reports("\n".join(map(json.dumps, ranks[2:])))
    assert places(first) == [(0, 0, 0, 2, 1, 2), (1, 0, 1, 2, 1, 2)]
    assert places(second) == [(0, 0, 0, 2, 2, 1), (1, 1, 0, 2, 2, 1)]
    assert {report["environment"]["job_id"] for report in (alone, *ranks)} == {job}
    assert first[0]["environment"]["master_port"] != second[0]["environment"]["master_port"]


def test_array_tasks_differ_in_job_id_and_port(sandbox: SlurmSandbox, tmp_path: Path) -> None:
    text = script(tmp_path, f"srun {command()}")
    options = ["--array=3-5", "-N1", "-n2", f"--output={tmp_path}/out-%a"]
    job = sandbox.submit(*options, "--wait", text, timeout=280)
    found = [reports((tmp_path / f"out-{task}").read_text()) for task in (3, 4, 5)]
    environments = [task[0]["environment"] for task in found]
    assert [places(task) for task in found] == [[(0, 0, 0, 2, 2, 1), (1, 1, 0, 2, 2, 1)]] * 3
    assert [e["job_id"] for e in environments] == [f"{job}_3", f"{job}_4", f"{job}_5"]
    assert [e["array_task"] for e in environments] == [3, 4, 5]
    assert len({e["master_port"] for e in environments}) == 3


def test_a_requeued_job_counts_its_restarts_and_takes_another_port(sandbox: SlurmSandbox, tmp_path: Path) -> None:
    text = script(tmp_path, f"srun {command()}", '[ "${SLURM_RESTART_COUNT:-0}" = 1 ] || sleep 60')
    job = sandbox.submit("--requeue", "--open-mode=append", f"--output={tmp_path}/out", text)
    sandbox.wait_job(job, "RUNNING")
    while not (tmp_path / "out").exists() or "{" not in (tmp_path / "out").read_text():
        assert sandbox.job(job)["JobState"] == "RUNNING"
    sandbox.requeue(job)
    sandbox.wait_job(job, "COMPLETED")
    first, second = (report["environment"] for report in printed((tmp_path / "out").read_text()))
    assert (first["restart_count"], second["restart_count"]) == (0, 1)
    assert first["job_id"] == second["job_id"] == job
    assert first["master_port"] != second["master_port"]


def test_ranks_started_from_a_shell_on_a_terminal(sandbox: SlurmSandbox, tmp_path: Path) -> None:
    """`srun --pty` is a shell, and what srun starts in it is a rank, although the shell's variables leak into it.

    They also leak into a batch script that is submitted from it, which is none.
    """
    (tmp_path / "batch.sh").write_text(f"#!/bin/bash\n{command()}\nsrun {command()} > {tmp_path}/ranks_of_batch\n")
    text = script(
        tmp_path,
        f"{command()} > {tmp_path}/shell",
        f"srun --overlap -N2 -n2 {command()} > {tmp_path}/ranks",
        f"sbatch --wait -N1 -n2 --output={tmp_path}/batch {tmp_path}/batch.sh",
    )
    terminal = f"srun -N2 -n4 --pty bash -c '[ $SLURM_PROCID != 0 ] || bash {text}'"
    done = sandbox.run(["script", "--quiet", "--return", "--command", terminal, "/dev/null"])
    assert done.returncode == 0, done.stdout
    (shell,) = reports((tmp_path / "shell").read_text())
    assert not shell["is_rank"]
    assert places([shell]) == [(0, 0, 0, 1, 1, 1)]
    assert places(reports((tmp_path / "ranks").read_text())) == [(0, 0, 0, 2, 1, 2), (1, 0, 1, 2, 1, 2)]
    (batch,) = reports((tmp_path / "batch").read_text())
    assert not batch["is_rank"]
    assert places(reports((tmp_path / "ranks_of_batch").read_text())) == [(0, 0, 0, 2, 2, 1), (1, 1, 0, 2, 2, 1)]


def test_a_contradiction_stops_every_task(sandbox: SlurmSandbox) -> None:
    done = sandbox.run(["srun", "-n2", *ENV], env={"WORLD_SIZE": "8"})
    assert done.returncode == 2
    errors = printed(done.stdout)
    assert [error["variables"] for error in errors] == [{"WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "2"}] * 2

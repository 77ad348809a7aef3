"""Drills on a real SLURM of the programs on the pages: requeued jobs end as uninterrupted ones do."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmSandbox

EXAMPLES = Path(__file__).parents[2] / "docs/examples/programs"
CLUSTER = ("cluster=slurm", "cluster.cpus_per_process=1", "cluster.gpus_per_node=0")
PROGRAMS = {
    "ddp": "torch",
    "lightning_program": "lightning",
    "hf_trainer": "transformers",
    "accelerate_program": "accelerate",
}
"""By script: the package that it needs."""
PACED = Path(__file__).parent / "programs" / "paced.py"
PACE_S, STEPS = 0.03, 800
"""Long enough for two requeues, which SLURM carries out some seconds after it was asked."""
EPOCHS_PER_RANK = 15
"""How long Lightning trains: an epoch has 56 steps with one rank, and fewer with more."""
WITHOUT_SESSION = """
import os, time
from pathlib import Path

import numpy as np

saved = Path(os.environ["HPCTRAIN_CHECKPOINT_DIR"]) / "state.npz"
state = dict(np.load(saved)) if saved.exists() else {"weights": np.ones(4), "step": np.array(0)}
while state["step"] < 200:
    state = {"weights": state["weights"] * 1.01 + state["step"] / 7, "step": state["step"] + 1}
    time.sleep(0.1)
    if state["step"] % 10 == 0:
        new = saved.with_name("new.npz")
        np.savez(new, **state)
        new.replace(saved)
"""


def drill(sandbox: SlurmSandbox, folder: Path, *words: str, command: list[str]) -> dict[str, object]:
    argv = [sys.executable, "-m", "hpctrain", "drill", "run", "--json", "run_dir=here", "cluster=slurm", *words]
    done = sandbox.run([*argv, "--", sys.executable, *command], timeout=560, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, object] = json.loads(done.stdout)
    assert report["exact"]
    return report


@pytest.mark.nightly  # the gate has a drill on this machine, tests/multiprocess/test_drill.py
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_requeued_program_is_the_straight_one(
    program: str, nodes: int, sandbox: SlurmSandbox, tmp_path: Path
) -> None:
    package = PROGRAMS[program]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} isn't installed")
    shutil.copy(EXAMPLES / f"{program}.py", tmp_path)
    (tmp_path / "pace").write_text(str(PACE_S))
    amount = EPOCHS_PER_RANK * nodes if program == "lightning_program" else STEPS
    # a mean over the steps of the last attempt
    words = (*CLUSTER, f"nodes={nodes}", "--interruptions", "2", "--ignore", "train_loss")
    report = drill(sandbox, tmp_path, *words, command=[str(PACED), "pace", f"{program}.py", str(amount)])
    first, *others = Ledger(RunDirectory.at(report["interrupted"])).attempts()
    assert len(others) == len(report["interruptions"])
    assert [entry.start_step for entry in others] == [one["step"] for one in report["interruptions"]]
    assert {entry.job_id for entry in others} == {first.job_id}
    compared = {row["what"]: row for row in report["compared"]}
    assert int(compared["tensors"]["straight"]) >= 12
    assert compared["train/loss" if program != "hf_trainer" else "loss"]["equal"]


@pytest.mark.nightly
def test_a_requeued_program_that_reports_nothing(sandbox: SlurmSandbox, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(WITHOUT_SESSION)
    words = ("cluster.cpus_per_process=1", "--interruptions", "1")
    report = drill(sandbox, tmp_path, *words, command=["plain.py"])
    (interruption,) = report["interruptions"]
    assert interruption["step"] is None
    assert interruption["saved"]
    assert [(row["what"], row["straight"]) for row in report["compared"]] == [("save", "state.npz"), ("tensors", "2")]

"""A drill on a real SLURM: jobs that are requeued in the middle of a training."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmSandbox


TASK = """
import os, sys, time

from hpctrain.tasks.digits import Digits

INTERRUPTED = sys.argv[-1].endswith("interrupted") and "SLURM_RESTART_COUNT" not in os.environ


class Slow(Digits):
    def loss(self, model, batch):
        time.sleep(0.1 if INTERRUPTED else 0.03)  # SLURM may be late with the requeue, and the drill to ask for it
        return super().loss(model, batch)
"""


@pytest.mark.nightly
def test_a_requeued_run_is_the_straight_run(sandbox: SlurmSandbox, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TASK)
    words = ["cluster=slurm", "cluster.cpus_per_process=1", "trainer.max_steps=120", "run_dir=here"]
    words += ["task=custom", "task._target_=own.Slow"]
    command = [sys.executable, "-m", "hpctrain", "drill", "--interruptions", "1", "--json", *words]
    done = sandbox.run(command, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["exact"]
    (interruption,) = report["interruptions"]
    assert interruption["how"] == "scontrol requeue"
    first, second = Ledger(RunDirectory.at(report["interrupted"])).attempts()
    assert (first.job_id, first.world_size) == (second.job_id, 1)
    assert (second.start_step, second.end_step) == (interruption["step"], 120)
    compared = {row["what"]: row for row in report["compared"]}
    assert compared["weights digest"]["equal"]
    assert compared["samples by rank"]["straight"] == "of 120 steps"

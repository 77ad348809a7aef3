"""Runs that a program submits, watches and loads, without a shell."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.slurm.programs.submitted_runs import PROGRAMS, Straight

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmSandbox

PIPELINE = PROGRAMS / "pipeline.py"


def run_pipeline(sandbox: SlurmSandbox, folder: Path, *words: str) -> dict[str, Any]:
    command = [sys.executable, str(PIPELINE), str(folder / "run"), *words]
    done = sandbox.run(command, cwd=folder, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)  # nothing else was printed
    return found


@pytest.mark.nightly
def test_a_program_submits_a_run_and_loads_its_model(sandbox: SlurmSandbox, tmp_path: Path) -> None:
    found = run_pipeline(sandbox, tmp_path)
    assert found.pop("submitted") in ("queued", "starting", "running")
    assert len(found.pop("digest")) == 64
    assert found == {
        "state": "completed",
        "attempts": ["completed"],
        "losses": [20, 40],
        "best": "loss",
        "model": 6 * 16 + 16 + 16 * 3 + 3,
    }


@pytest.mark.nightly
def test_a_program_cancels_a_run_and_resumes_it_exactly(
    sandbox: SlurmSandbox, straight: Straight, tmp_path: Path
) -> None:
    (tmp_path / "pace").write_text("0.3")
    found = run_pipeline(sandbox, tmp_path, str(tmp_path / "pace"))
    done, state = found["cancelled"]
    assert done.startswith("cancelled job ")
    assert (state, found["attempts"]) == ("cancelled", ["cancelled", "completed"])
    words = ("trainer.max_steps=40", "+task.eval_samples=16", "trainer.eval_every_steps=20", "logger.every_steps=20")
    assert found["digest"] == straight(*words)

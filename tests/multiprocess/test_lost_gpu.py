"""A GPU that is lost, as after a label out of range: the error is recorded, though nothing may be freed any more.

The programs' `lost.Used` stands for what ends a process that frees it; tests/gpu/test_failures.py has the real ones.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.run.exit_record import read_exit_records

PROGRAM = Path(__file__).parent / "programs" / "lost.py"
ASSERT = "AcceleratorError: CUDA error: device-side assert triggered"
WORDS = (
    "task=custom",
    "task._target_=tests.multiprocess.programs.lost.Lost",
    "logger.tensorboard=false",
    "logger.every_steps=1",
    "trainer.global_batch_size=8",
    "trainer.max_epochs=null",
    "trainer.max_steps=6",
    "checkpoint.every_steps=1",
)
TWO = "cluster.processes_per_node=2"
FAULT = {"TRIAL_ACT": "0:3:fault"}


@pytest.fixture
def python(variables, tmp_path):
    """Run Python as users do, and return how the process ended."""

    def run(*words, **more):
        command = [sys.executable, *map(str, words)]
        return subprocess.run(
            command, env=variables | more, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False
        )

    return run


def records(run, attempt=1):
    return read_exit_records(run.directory.attempt(attempt))


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.nightly), 2])
def test_one_rank_fails_with_its_error(python, run_at, tmp_path, num_workers):
    done = python("-m", "hpctrain", "run_dir=run", *WORDS, f"data.num_workers={num_workers}", **FAULT)
    assert done.returncode == 1, done.stderr
    run = run_at(tmp_path / "run")
    assert run.attempts == [(0, "failed", 2)]
    record = records(run)[0]
    assert (str(record.reason), record.step) == ("failed", 2)
    assert record.message.startswith(ASSERT)
    assert done.stderr.count(ASSERT) == 1
    assert "once the cause is fixed, resume with: " in done.stderr
    assert run.steps, "a save that was being written is finished"


@pytest.mark.nightly
def test_an_evaluation_fails_with_its_error(python, run_at, tmp_path):
    words = ("+task.evaluation=3", "+task.eval_samples=30", "data.num_workers=2", "trainer.eval_every_steps=2")
    done = python("-m", "hpctrain", "run_dir=run", *WORDS, *words)
    assert done.returncode == 1, done.stderr
    run = run_at(tmp_path / "run")
    assert [reason for _, reason, _ in run.attempts] == ["failed"]
    assert records(run)[0].message.startswith(ASSERT)


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_ranks_the_one_at_fault_is_named(python, run_at, tmp_path, rank):
    words = (*WORDS, TWO, "data.num_workers=2")
    done = python("-m", "hpctrain", "run_dir=run", *words, TRIAL_ACT=f"{rank}:3:fault")
    assert done.returncode == 1, done.stderr
    run = run_at(tmp_path / "run")
    assert [reason for _, reason, _ in run.attempts] == ["failed"]
    record = records(run)[rank]
    assert (str(record.reason), record.blames_peer) == ("failed", False)
    assert record.message.startswith(ASSERT)


@pytest.mark.nightly
def test_the_next_run_of_a_sweep_gets_a_process_of_its_own(python, run_at, tmp_path):
    words = ("-m", "run_dir=sweep", *WORDS, "+task.healthy=false,true")
    done = python("-m", "hpctrain", *words, **FAULT)
    assert done.returncode == 1, done.stderr
    ends = [run_at(path.parent).attempts for path in sorted(tmp_path.glob("sweep/*/attempts.jsonl"))]
    assert ends == [[(0, "failed", 2)], [(0, "completed", 6)]]


@pytest.mark.nightly
def test_fit_batch_does_not_take_it_for_a_lack_of_memory(python):
    done = python("-m", "hpctrain", "fit-batch", *WORDS, "+task.samples=2", "--largest", "4")
    assert done.returncode == 1, done.stdout
    assert ASSERT in done.stderr
    assert "three steps with micro-batches of 2 failed: see above" in done.stderr
    assert "too large" not in done.stdout


@pytest.mark.nightly
def test_a_program_gets_the_error_and_continues(python, tmp_path):
    done = python(PROGRAM, tmp_path, **FAULT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["got CUDA error: device-side assert triggered", "failed 2"]

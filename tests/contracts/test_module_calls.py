"""How many modules a submission, a short training and one step pass through; printed with `pytest -s`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUIET = (
    *("trainer.max_epochs=null", "trainer.eval_every_steps=1000", "checkpoint.every_steps=10000"),
    *("logger.measure=false", "logger.every_steps=1000"),
)
"""A training whose steps have nothing between them: no record, no evaluation, no save."""
STEPS = (100, 400)


@pytest.fixture(scope="module")
def module_calls(tmp_path_factory):
    """Run hpctrain in a folder of its own: how often its modules are entered, by the main thread and by others."""

    def run(*arguments: str) -> tuple[Counter[str], Counter[str]]:
        folder = tmp_path_factory.mktemp("traced")
        program = [sys.executable, str(ROOT / "tests" / "support" / "module_calls.py"), "calls.json", *arguments]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(program, cwd=folder, env=environ, check=True, capture_output=True)
        main, threads = json.loads((folder / "calls.json").read_text())
        return Counter(main), Counter(threads)

    return run


def test_a_submission_passes_few_modules(module_calls):
    main, threads = module_calls("cluster=slurm", "nodes=4", "cluster.dry_run=true")
    modules = len(main.keys() | threads.keys())
    print(f"\na submission: {modules} modules")
    assert modules <= 45


@pytest.mark.nightly
def test_a_training_and_each_of_its_steps_pass_few_modules(module_calls):
    (short, threads), (long, _) = (module_calls(f"trainer.max_steps={steps}", *QUIET) for steps in STEPS)
    modules = len(short.keys() | threads.keys())
    # Whole calls: once an epoch the samples are shuffled, and now and then the watchdog wakes the main thread up.
    per_step = {module: int((count - short[module]) / (STEPS[1] - STEPS[0]) + 0.05) for module, count in long.items()}
    in_each_step = [module for module, calls in per_step.items() if calls > 0]
    calls_per_step = sum(per_step.values())
    print(f"\na training: {modules} modules; each step: {len(in_each_step)} modules, {calls_per_step} calls")
    assert modules <= 152
    assert len(in_each_step) <= 13
    assert calls_per_step <= 25

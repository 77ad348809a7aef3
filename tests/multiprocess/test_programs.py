"""The programs of docs/examples/programs, drilled: interrupted, they end with the same tensors and metrics."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "docs" / "examples" / "programs"
LENGTHS = {"ddp": 120, "accelerate_program": 120, "hf_trainer": 120, "lightning_program": 4}
"""By program: its argument, steps or epochs."""
PACKAGES = {"accelerate_program": "accelerate", "hf_trainer": "transformers", "lightning_program": "lightning"}


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", LENGTHS)
def test_interrupted_and_straight_are_equal(name, world_size, tmp_path, variables):
    package = PACKAGES.get(name, "sklearn")
    if find_spec(package) is None:
        pytest.skip(f"needs {package}")
    words = ["drill", "run", f"cluster.processes_per_node={world_size}", f"run_dir={tmp_path}/drill"]
    command = ["--", sys.executable, f"{name}.py", str(LENGTHS[name])]
    environ = {key: value for key, value in variables.items() if key != "PYTHONWARNINGS"}
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", *words, *command],
        cwd=PROGRAMS,
        env=environ,
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # a short program may end before a second interruption
    assert "exact: interrupted after step" in done.stdout


APART = "import time, torch; time.sleep(70)"
LATE = "import time, torch; time.sleep(65); torch.distributed.init_process_group('gloo'); time.sleep(10)"


@pytest.mark.nightly
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("code", "is_separate"), [(APART, True), (LATE, False)], ids=["never", "late"])
def test_ranks_that_have_not_connected_after_a_minute_are_named(code, is_separate, tmp_path, variables):
    hpctrain = [sys.executable, "-m", "hpctrain"]
    words = [
        "run",
        "run_dir=run",
        "code.snapshot=none",
        "cluster.processes_per_node=2",
        "--",
        sys.executable,
        "-c",
        code,
    ]
    done = subprocess.run(
        [*hpctrain, *words], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    separate = "rank 1 has not connected to rank 0, so each may be training its own model"
    assert done.stdout.count(separate) == 1
    assert ("rank 0 has a connection now" in done.stdout) is not is_separate
    status = subprocess.run([*hpctrain, "status", "run"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (f"completed: {separate}" in status.stdout) is is_separate

"""The programs of the pages on migration: before and after, they reach the same loss."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpctrain.files import read_json_lines

PAGES = Path(__file__).parents[2] / "docs" / "how_to"
LOSS, ACCURACY = 0.05, 0.03
"""The tolerances that the pages state."""
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0", "--rdzv_backend=c10d"]
BEFORE = {
    "from_accelerate": ("accelerate", ["before.py"]),
    "from_ddp": ("torch", [*TORCHRUN, "--rdzv_endpoint=127.0.0.1:0", "before.py"]),
    "from_hf_trainer": ("transformers", ["before.py"]),
    "from_hydra_submitit": ("hydra_plugins.hydra_submitit_launcher", ["before.py", "-m", "lr=3e-3,1e-3"]),
    "from_lightning": ("lightning", ["before.py"]),
}
"""By page: the package that its first program needs, and the words that start it."""


def start(words, folder):
    foreign = ("SLURM", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "HPCTRAIN")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def result(text):
    loss, accuracy = re.findall(r"loss (\d\.\d+) accuracy (\d\.\d+)", text)[-1]
    return float(loss), float(accuracy)


@pytest.mark.nightly
@pytest.mark.parametrize("page", BEFORE)
def test_both_programs_reach_the_same_loss(page, tmp_path):
    package, words = BEFORE[page]
    text = (PAGES / f"{page}.md").read_text()
    for name, content in re.findall(r"^```(?:python|yaml) (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    if find_spec(package.partition(".")[0]) is None or find_spec(package) is None:
        pytest.skip(f"needs {package}")
    printed = start(words, tmp_path)
    if page == "from_hydra_submitit":
        printed = (tmp_path / "multirun" / "0" / "result.txt").read_text()
    loss, accuracy = result(printed)
    assert accuracy > 0.85
    processes = 2 if page == "from_ddp" else 1
    (experiment,) = (tmp_path / "conf" / "experiment").glob("*.yaml")
    after = [f"experiment={experiment.stem}", "run_dir=after", f"cluster.processes_per_node={processes}"]
    start(["-m", "hpctrain", *after, "logger.tensorboard=false"], tmp_path)
    last = [record for record in read_json_lines(tmp_path / "after" / "metrics.jsonl") if "eval/loss" in record][-1]
    assert last["eval/loss"] == pytest.approx(loss, abs=LOSS)
    assert last["eval/accuracy"] == pytest.approx(accuracy, abs=ACCURACY)

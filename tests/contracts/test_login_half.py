"""What runs on a login node starts in a fraction of a second, without torch."""

import os
import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "tensorboard", "sklearn")

PROGRAM = """
import sys
from hpctrain.cli import main
code = main({words!r})
heavy = sorted(name for name in {heavy!r} if name in sys.modules)
print("HEAVY", heavy, "CODE", int(code))
"""


@pytest.mark.parametrize(
    "words",
    [
        ["cluster=slurm", "nodes=4", "cluster.dry_run=true"],
        ["-m", "cluster=slurm", "optimizer.lr=1e-3,3e-4", "cluster.dry_run=true"],
        ["task=text", "cluster.dry_run=true"],
        ["--cfg", "job"],
        ["--help"],
        ["env"],
        ["status"],
    ],
    ids=" ".join,
)
def test_no_torch_in_the_process(words, tmp_path):
    program = PROGRAM.format(words=words, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "HEAVY [] CODE 0" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_imports_no_torch_where_it_is_typed(tmp_path):
    """import-linter can't tell: it leaves out what only the ranks of the doctor's job import."""
    program = PROGRAM.format(words=["doctor"], heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "HEAVY [] CODE 0" in done.stdout


def test_importtime_shows_no_torch(tmp_path):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "hpctrain", "cluster=slurm", "cluster.dry_run=true"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "submitit" in imported
    assert not any(name == heavy or name.startswith(f"{heavy}.") for name in imported for heavy in HEAVY)


FROM_PYTHON = """
import sys
import hpctrain
names = [name for name in sys.modules if name.startswith("hpctrain.")]
assert names == ["hpctrain.startup"], names
config = hpctrain.compose(["cluster=slurm", "nodes=4", "run_dir=run"])
run = hpctrain.submit(config)
(run.path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}')
print(run.status().job_ids, run.metrics(), run.checkpoints(), run.config.nodes)
try:
    run.resume()
except hpctrain.HpctrainError as error:
    print(error)
print("HEAVY", sorted(name for name in %r if name in sys.modules))
"""


def test_no_torch_in_a_program_that_submits(tmp_path):
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho Submitted batch job 7\n")
    (tmp_path / "sbatch").chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    program = [sys.executable, "-c", FROM_PYTHON % (HEAVY,)]
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first == "('7',) [{'step': 1, 'train/loss': 2.0}] [] 4"
    assert last == "HEAVY []"

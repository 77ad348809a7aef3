"""The wheel works outside of the checkout: the package, its configuration, its commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import hpctrain

ROOT = Path(__file__).parents[2]
DIGITS = "hpctrain/tasks/digits.gz"
COMPOSE_EACH_GROUP = """
import json
import sys
from hpctrain.config import compose
training = compose.Composer()
others = {
    "run": compose.ProgramComposer(["true"]).compose_run,
    "sweep": compose.SweepComposer().compose_sweep,
}
needed = json.loads(sys.argv[1])
done = []
last_of_each = {path.parent.name: path.stem for path in sorted(compose.conf_dir().glob("*/*.yaml"))}
for group, option in last_of_each.items():
    words = [f"{group}={option}", *needed.get(f"{group}={option}", [])]
    others.get(group, training.compose_run)(words)
    done.append(f"{group}/{option}")
print(json.dumps({"file": compose.__file__, "conf": str(compose.conf_dir()), "done": done}))
"""

OPTIONAL = [
    "datasets",
    "keras",
    "mlflow",
    "optuna",
    "pandas",
    "sklearn",
    "textual",
    "tiktoken",
    "torchmetrics",
    "wandb",
]
"""The modules that only the extras of hpctrain install."""


def run(command, cwd, **variables):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SLURM_"))}
    done = subprocess.run(command, cwd=cwd, env={**environ, **variables}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    options = [
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "--disable-pip-version-check",
        "--wheel-dir",
        str(folder),
    ]
    run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], folder)
    (built,) = folder.glob("hpctrain-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A fresh virtual environment with the wheel; what hpctrain requires is this environment's, without the extras."""
    folder = tmp_path_factory.mktemp("venv")
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder)
    python = folder / "bin" / "python"
    options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    run([sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(wheel)], folder)
    # a folder that a .pth file adds doesn't have its own .pth files read: the checkout's editable install stays out
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    (site / "hidden.pth").write_text(f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL}))\n")
    return folder


def test_what_is_in_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"hpctrain"}
    assert {"hpctrain/conf/train.yaml", "hpctrain/py.typed", "hpctrain/cli/train.py"} <= names
    checkout = {f"hpctrain/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert checkout == {name for name in names if name.startswith("hpctrain/conf/")}


def test_licence_and_digits_are_in_wheel_and_sdist(wheel, tmp_path):
    text = (ROOT / "LICENSE").read_bytes()
    assert text.strip().startswith(b"Apache License\n")
    with zipfile.ZipFile(wheel) as archive:
        (inside,) = (name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
        assert archive.read(inside) == text
        assert DIGITS in archive.namelist()
    run([sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)], ROOT)
    (sdist,) = tmp_path.glob("hpctrain-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
        (inside,) = (name for name in names if name.count("/") == 1 and name.endswith("/LICENSE"))
        assert archive.extractfile(inside).read() == text
    assert f"{names[0].partition('/')[0]}/{DIGITS}" in names


@pytest.mark.nightly
def test_an_option_of_each_group_composes_from_another_folder(installed, needed, tmp_path):
    python = str(installed / "bin" / "python")
    found = json.loads(run([python, "-c", COMPOSE_EACH_GROUP, json.dumps(needed)], tmp_path))
    assert Path(found["file"]).is_relative_to(installed)
    assert Path(found["conf"]).is_relative_to(installed)
    last_of_each = {path.parent.name: path.stem for path in sorted((ROOT / "conf").glob("*/*.yaml"))}
    assert found["done"] == [f"{group}/{option}" for group, option in last_of_each.items()]
    assert list(tmp_path.iterdir()) == []


def test_its_commands_work(installed, tmp_path):
    python = str(installed / "bin" / "python")
    assert run([python, "-m", "hpctrain", "--version"], tmp_path).strip() == hpctrain.__version__
    assert "options: [local] slurm" in run([python, "-m", "hpctrain", "--help", "cluster"], tmp_path)
    assert "no runs under" in run([str(installed / "bin" / "hpctrain"), "status"], tmp_path)
    script = run([python, "-m", "hpctrain", "cluster=slurm", "nodes=2", "cluster.dry_run=true"], tmp_path)
    assert "#SBATCH --nodes=2" in script
    assert list(tmp_path.iterdir()) == []


def test_the_default_training_needs_no_extra(installed, tmp_path):
    python = str(installed / "bin" / "python")
    output = run([python, "-m", "hpctrain", "run_dir=run", "trainer.max_steps=2"], tmp_path)
    assert "task        hpctrain.tasks.digits.Digits" in output
    assert (tmp_path / "run" / "checkpoints" / "step_00000002").is_dir()

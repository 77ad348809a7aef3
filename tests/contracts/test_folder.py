"""Commands that don't train import nothing from the folder where they are typed; those that train find a task there."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import hpctrain
from hpctrain.cli import COMMANDS

SCRIPT = "import sys\nfrom hpctrain.__main__ import main\nsys.exit(main())\n"
TASK = """
from torch import nn, rand
from torch.utils.data import TensorDataset
from hpctrain.tasks import Task

class Own(Task):
    def build_model(self):
        return nn.Linear(1, 1)
    def train_dataset(self):
        return TensorDataset(rand(64, 1))
    def loss(self, model, batch):
        return model(batch[0]).square().mean()
"""
TRAINS = ("task=custom", "task._target_=own_task.Own", "trainer.max_steps=1", "logger.tensorboard=false", "run_dir=run")


def plant(folder: Path) -> None:
    """Give the folder a module of each name that a command could import; importing one leaves a line in `imported`."""
    loaded = subprocess.run(
        [sys.executable, "-c", "import runpy, sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    # by `python -m` itself, before hpctrain starts
    early = {name.partition(".")[0] for name in loaded.stdout.split()}
    installed = {module.name for module in pkgutil.iter_modules()}
    # Python itself imports sitecustomize, which Debian's Python has, before any line of a program
    for name in {*sys.stdlib_module_names, *installed} - early - {"hpctrain", "sitecustomize"}:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'imported')!r}, 'a').write({name!r} + ' ')")
    plugins = folder / "hydra_plugins"
    plugins.mkdir()
    (plugins / "evil.py").write_text(f"open({str(folder / 'imported')!r}, 'a').write('plugin')")


def require_nothing_imported(folder: Path) -> None:
    imported = folder / "imported"
    names = imported.read_text() if imported.exists() else ""
    imported.unlink(missing_ok=True)
    assert not names


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    plant(folder)
    return folder


def run(folder: Path, command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SLURM_"))}
    return subprocess.run(
        command, cwd=folder, env=environ | variables, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script `hpctrain`, as pip writes it."""
    script = tmp_path_factory.mktemp("bin") / "hpctrain"
    script.write_text(SCRIPT)
    return script


# `--help` of all commands shares a process
HELP = f"""
import sys
from hpctrain.startup import exclude_working_directory
exclude_working_directory()
import contextlib
from hpctrain.cli import main
for command in ({", ".join(map(repr, (*COMMANDS, "drill run")))}):
    with contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
"""
SETUP = ("task=custom", "task._target_=own_task.Own", "cluster.dry_run=true")
RUNS_CODE = [
    [*SETUP],
    ["-m", *SETUP, "seed=1,2"],
    ["fit-batch", "nodes=x"],
    ["drill", "nodes=x"],
    ["drill", "run", "x"],
]
LOOKS = [[command, "nowhere"] for command in COMMANDS if command not in ("completion", "doctor", "drill", "fit-batch")]
LOOKS += [["completion", "query", word] for word in ("", "st", "task=", "trainer.")]
LOOKS += [["status"], ["--cfg", "job"], ["--info", "config"], ["--help", "task"], ["best", "S", "--export", "x"]]


@pytest.mark.parametrize(
    "words",
    [
        *(["status"], ["doctor", "cluster.gpus_per_node=0"], ["resume", "nowhere"]),
        *(pytest.param(words, marks=pytest.mark.nightly) for words in (["env"], ["--help"], *LOOKS, *RUNS_CODE)),
    ],
    ids=" ".join,
)
def test_python_m_imports_nothing_from_the_folder(planted: Path, words: list[str]) -> None:
    done = run(planted, [sys.executable, "-m", "hpctrain", *words])
    require_nothing_imported(planted)
    assert "Traceback" not in done.stderr


def test_nor_does_help(planted: Path) -> None:
    done = run(planted, [sys.executable, "-c", HELP])
    require_nothing_imported(planted)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("usage: ") == len(COMMANDS) + 1


@pytest.mark.nightly
def test_a_trial_of_fit_batch_imports_torch_before_the_folder_counts(planted: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch of the folder')")
    (tmp_path / "own_task.py").write_text(TASK)
    done = run(tmp_path, [sys.executable, "-m", "hpctrain", "fit-batch", *TRAINS[:2], "--largest", "2"])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["supervise", pytest.param("search", marks=pytest.mark.nightly)])
def test_nor_does_the_program_of_a_batch_script(planted: Path, module: str) -> None:
    done = run(planted, [sys.executable, "-m", f"hpctrain.{module}", "nowhere"])
    require_nothing_imported(planted)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr


def test_nor_does_the_script_with_an_empty_entry_in_pythonpath(planted: Path, installed: Path) -> None:
    done = run(planted, [sys.executable, str(installed), "status"], PYTHONPATH=f"{Path(hpctrain.__file__).parents[1]}:")
    assert done.returncode == 0, done.stderr
    require_nothing_imported(planted)


def test_python_itself_does(planted: Path, tmp_path: Path) -> None:
    """The planted modules would be imported."""
    plant(tmp_path)
    run(tmp_path, [sys.executable, "-m", "submitit"])
    assert (tmp_path / "imported").exists()


@pytest.mark.nightly
def test_both_find_a_task_in_the_folder(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "own_task.py").write_text(TASK)
    done = run(tmp_path, [sys.executable, str(installed), *TRAINS])
    assert done.returncode == 0, done.stderr
    again = run(tmp_path, [sys.executable, str(installed), "resume", "run", "trainer.max_steps=2"])
    assert again.returncode == 0, again.stderr
    assert "attempt 2" in again.stdout


@pytest.mark.nightly
def test_with_pythonsafepath_only_a_folder_that_pythonpath_names_is_searched(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "own_task.py").write_text(TASK)
    words = [*TRAINS, "cluster.dry_run=true"]
    for command in ([str(installed)], ["-m", "hpctrain"]):
        done = run(tmp_path, [sys.executable, *command, *words], PYTHONSAFEPATH="1", PYTHONPATH=str(tmp_path))
        assert done.returncode == 0, done.stderr


def test_with_pythonsafepath_neither_does(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "own_task.py").write_text(TASK)
    for command in ([str(installed)], ["-m", "hpctrain"]):
        done = run(tmp_path, [sys.executable, *command, *TRAINS], PYTHONSAFEPATH="1")
        assert (done.returncode, done.stdout) == (2, "")
        place = "it is in this folder, where Python doesn't look with PYTHONSAFEPATH"
        assert f"the module own_task was not found: {place}; leave out PYTHONSAFEPATH, or set" in done.stderr

"""Whole sweeps on this machine: composed, launched one after another, and reported to the sweeper."""

from __future__ import annotations

import logging
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.sweeper import Sweeper

from hpctrain.cli import main
from hpctrain.config.compose import Composer
from hpctrain.errors import RunFailedError
from hpctrain.files import read_json_lines
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.sweep.multirun import last_objective, register_launcher, without_hydra_overrides
from hpctrain.sweep.sweep import Sweep

SHORT = ("model=convnet", "model.width=1", "trainer.max_steps=2", "logger.tensorboard=false")
FAILS = "model._target_=torch.nn.Identity"  # which takes any argument, and has nothing to train


@pytest.fixture(autouse=True)
def as_before(monkeypatch, tmp_path):
    """Runs in this process leave logging and threads as they were."""
    monkeypatch.chdir(tmp_path)
    logger, threads = logging.getLogger("hpctrain"), torch.get_num_threads()
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before
    torch.set_num_threads(threads)


def config_of(path):
    return yaml.safe_load((path / "config.yaml").read_text())


def reasons(path):
    return [str(entry.reason) for entry in Ledger(RunDirectory.at(path)).attempts()]


def last_loss(path):
    return [record["eval/loss"] for record in read_json_lines(path / "metrics.jsonl") if "eval/loss" in record][-1]


def test_runs_go_one_after_another_each_with_its_own_configuration(tmp_path, capsys):
    assert main(["-m", "run_dir=sweep", *SHORT, "optimizer.lr=0.1,0.01", "seed=3"]) == 0
    runs = [tmp_path / "sweep" / str(number) for number in range(2)]
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == ["0", "1"]
    assert [config_of(path)["optimizer"]["lr"] for path in runs] == [0.1, 0.01]
    assert [config_of(path)["seed"] for path in runs] == [3, 3]
    assert [config_of(path)["run_dir"] for path in runs] == [str(path) for path in runs]
    first, second = (Ledger(RunDirectory.at(path)).attempts()[-1] for path in runs)
    assert (first.reason, second.reason) == ("completed", "completed")
    assert first.end_time <= second.start_time
    out = capsys.readouterr().out
    assert out.index("run 1 of 2") < out.index(f"run directory {runs[0]}") < out.index("run 2 of 2")
    assert [path.name for path in tmp_path.iterdir()] == ["sweep"]  # nothing of Hydra's own


def test_without_a_run_directory_a_sweep_gets_one_of_its_own(tmp_path):
    assert main(["-m", *SHORT, "name=mine", "seed=1,2"]) == 0
    (home,) = (tmp_path / "runs" / "mine").iterdir()
    assert [reasons(home / str(number)) for number in range(2)] == [["completed"]] * 2


def test_a_failed_run_decides_the_exit_code_and_stops_no_other(tmp_path, capsys):
    models = "model._target_=hpctrain.models.convnet.ConvNet,torch.nn.Identity"
    assert main(["-m", "run_dir=sweep", *SHORT, models]) == 1
    assert [reasons(tmp_path / "sweep" / str(number)) for number in range(2)] == [["completed"], ["failed"]]
    assert "there is nothing to train" in capsys.readouterr().err


@pytest.fixture
def launcher(tmp_path):
    """The launcher as a sweeper has it."""
    return register_launcher(Composer(), Sweep(RunDirectory.at(tmp_path / "sweep"), ["a", "test"]))()


def test_a_batch_returns_its_losses(launcher, tmp_path):
    jobs = [[*SHORT, f"optimizer.lr={lr}", "hydra.job.chdir=false"] for lr in (0.1, 0.001)]
    returns = launcher.launch(jobs, initial_job_idx=4)
    assert [one.status for one in returns] == [JobStatus.COMPLETED] * 2
    assert [one.overrides for one in returns] == jobs
    assert [one.return_value for one in returns] == [last_loss(tmp_path / "sweep" / name) for name in "45"]
    assert returns[0].return_value != returns[1].return_value


def test_a_failed_run_of_a_batch_raises_when_it_is_asked_for(launcher):
    failed, finished = launcher.launch([[*SHORT, FAILS], [*SHORT]], initial_job_idx=7)
    assert (failed.status, finished.status) == (JobStatus.FAILED, JobStatus.COMPLETED)
    with pytest.raises(RunFailedError, match="run 7 ended with exit code 1"):
        _ = failed.return_value


def test_a_run_without_evaluation_has_no_objective(tmp_path):
    assert last_objective(RunDirectory.at(tmp_path)) is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    assert last_objective(RunDirectory.at(tmp_path)) is None


def test_hydras_own_overrides_are_not_the_runs():
    mixed = ["seed=1", "hydra.sweep.dir=x", "+hydra.job.name=y", "hydra/launcher=basic", "~hydra.run", "+task.hydra=1"]
    assert without_hydra_overrides(mixed) == ["seed=1", "+task.hydra=1"]


class Halving(Sweeper):
    """Halves the learning rate, one run at a time, `times` times; records the losses."""

    losses: list[float] = []  # noqa: RUF012 - of the one sweep that a test makes

    def __init__(self, times):
        self.times = times

    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            config=config, hydra_context=hydra_context, task_function=task_function
        )

    def sweep(self, arguments):
        for number in range(self.times):
            (result,) = self.launcher.launch([[*arguments, f"optimizer.lr={0.1 / 2**number}"]], initial_job_idx=number)
            self.losses.append(result.return_value)


@pytest.fixture
def halving(tmp_path, monkeypatch):
    """The sweeper as one that is installed beside Hydra, and a folder with its configuration."""
    module = types.ModuleType("hydra_plugins.halving")
    module.Halving = type("Halving", (Halving,), {"__module__": module.__name__})
    monkeypatch.setitem(
        sys.modules, "hydra_plugins", sys.modules.get("hydra_plugins", types.ModuleType("hydra_plugins"))
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    Plugins.instance().register(module.Halving)
    folder = tmp_path / "conf" / "hydra" / "sweeper"
    folder.mkdir(parents=True)
    (folder / "halving.yaml").write_text("_target_: hydra_plugins.halving.Halving\ntimes: 2\n")
    Halving.losses.clear()
    return str(tmp_path / "conf")


def test_a_sweeper_that_optimises_learns_the_losses(halving, tmp_path):
    words = ["--config-dir", halving, "-m", "hydra/sweeper=halving", "run_dir=sweep", *SHORT]
    assert main(words) == 0
    runs = [tmp_path / "sweep" / str(number) for number in range(2)]
    assert [config_of(path)["optimizer"]["lr"] for path in runs] == [0.1, 0.05]
    assert Halving.losses == [last_loss(path) for path in runs]


def test_a_failure_ends_a_sweep_that_asks_for_losses(halving, tmp_path, capsys):
    words = ["--config-dir", halving, "-m", "hydra/sweeper=halving", "run_dir=sweep", *SHORT, FAILS]
    assert main(words) == 1
    assert "hpctrain: error: the sweep ended: run 0 ended with exit code 1" in capsys.readouterr().err
    assert [path.name for path in Path("sweep").iterdir() if path.name.isdecimal()] == ["0"]

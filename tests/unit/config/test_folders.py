"""`./conf` adds options and replaces none; `--config-dir` comes before hpctrain's own."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.config.compose import Composer
from hpctrain.config.paths import own_folders
from hpctrain.errors import ConfigError

SITE = "defaults:\n  - slurm\n  - _self_\npartition: {partition}\n"
OURS = {
    "train.yaml": "seed: 99",
    "cluster/slurm.yaml": "partition: shadow",
    "optimizer/adamw.yaml": "lr: 99",
    "cluster/site.yaml": SITE.format(partition="here"),
    "experiment/mine.yaml": "# @package _global_\ndefaults:\n  - override /optimizer: sgd\ntrainer:\n  max_steps: 7\n",
    "task/wide.yaml": "defaults:\n  - digits\n  - override /model@_global_.model: mlp\n  - _self_\nheld_out: 0.5\n",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def conf(here: Path) -> Path:
    return write(here / "conf", OURS)


def test_it_adds_options(conf: Path) -> None:
    config = Composer().compose(["cluster=site", "experiment=mine", "task=wide"])
    assert config.cluster.partition == "here"
    assert (config.trainer.max_steps, config.optimizer["_target_"]) == (7, "torch.optim.SGD")
    assert (config.task["held_out"], config.model["_target_"]) == (0.5, "hpctrain.models.mlp.MLP")


def test_it_replaces_none(conf: Path) -> None:
    config = Composer().compose(["cluster=slurm"])
    assert (config.seed, config.cluster.partition, config.optimizer["lr"]) == (0, None, 3e-3)


def test_the_named_folder_comes_first(conf: Path, here: Path) -> None:
    named = {"cluster/site.yaml": SITE.format(partition="named"), "optimizer/adamw.yaml": "_target_: torch.optim.Adam"}
    write(here / "named", named)
    config = Composer("named").compose(["cluster=site", "task=wide"])
    assert (config.cluster.partition, config.optimizer["_target_"]) == ("named", "torch.optim.Adam")
    assert config.task["held_out"] == 0.5
    # as in the documentation; the same folder isn't searched twice
    assert Composer("conf").options.of("cluster").count("site") == 1


def test_options_are_named_in_help_and_in_messages(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "cluster"]) == 0
    assert "options: [local] site slurm" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="choose one of local, site, slurm"):
        Composer().compose(["cluster=sitee"])


@pytest.mark.nightly
def test_a_sweep_over_its_options_and_a_resume_find_them(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(conf, {"optimizer/slow.yaml": "defaults:\n  - sgd\n  - _self_\nlr: 1e-5\n"})
    assert main(["-m", "cluster=site", "cluster.dry_run=true", "optimizer=slow,adamw", "run_dir=many"]) == 0
    assert "#SBATCH --partition=here" in capsys.readouterr().out
    quick = ["model=convnet", "model.width=1", "trainer.max_steps=1", "logger.tensorboard=false"]
    assert main([*quick, "run_dir=run"]) == 0
    assert main(["resume", "run", "cluster=site", "cluster.dry_run=true", "trainer.max_steps=2"]) == 0
    assert "#SBATCH --partition=here" in capsys.readouterr().out


def test_a_file_that_is_no_yaml_is_named(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(conf, {"experiment/broken.yaml": "a: [1\nb: 2\n"})
    assert main(["experiment=broken"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hpctrain: error: experiment=broken: {conf}/experiment/broken.yaml, line 2, is not valid")
    assert error.count("\n") == 1


def test_a_folder_in_it_that_is_another_users_is_named(conf: Path) -> None:
    composer = Composer()
    with (
        pytest.raises(ConfigError, match=r"^configuration=\S+/conf/cluster: can't be read; change its permissions$"),
        composer.explaining(["cluster=local"]),
    ):
        raise PermissionError(errno.EACCES, "Permission denied", str(conf / "cluster"))  # as root reads everything


@pytest.mark.parametrize("make", [lambda path: path.write_text("a file"), lambda path: path.symlink_to("nowhere")])
def test_something_else_of_that_name_is_ignored(here: Path, make) -> None:
    make(here / "conf")
    assert own_folders(None) == (None, None)
    assert json.dumps(Composer().options.of("cluster")) == '["local", "slurm"]'

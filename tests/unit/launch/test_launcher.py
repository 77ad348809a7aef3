from __future__ import annotations

import time

import pytest

from hpctrain.cli import main
from hpctrain.config.compose import Composer
from hpctrain.errors import SchedulerMissingError
from hpctrain.launch.launcher import launch


@pytest.fixture(scope="module")
def composer():
    return Composer()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def test_a_dry_run_here_writes_nothing(composer, folder, capsys):
    assert launch(composer.compose(["cluster.dry_run=true", "run_dir=R"]), []) == 0
    assert capsys.readouterr().out == f"nothing was launched; 1 process here would train in {folder}/R\n"
    assert list(folder.iterdir()) == []


def test_a_dry_run_on_slurm_prints_the_script(composer, folder, capsys):
    words = ["cluster=slurm", "nodes=4", "cluster.processes_per_node=2", "cluster.dry_run=true", "run_dir=R"]
    assert launch(composer.compose(words), []) == 0
    out = capsys.readouterr().out
    assert "#SBATCH --nodes=4\n" in out
    assert f"# nothing was submitted; the job would train with 8 ranks in {folder}/R\n" in out
    assert list(folder.iterdir()) == []


def test_what_is_probably_not_meant_is_a_warning(composer, capsys):
    words = ["cluster=slurm", "cluster.partition=gpu", "cluster.dry_run=true"]
    assert launch(composer.compose(words), []) == 0
    assert capsys.readouterr().err.startswith("hpctrain: warning: cluster.partition=gpu looks like a GPU partition")


def test_a_submission_that_fails_leaves_no_run_directory(composer, folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(SchedulerMissingError, match="login node"):
        launch(composer.compose(["cluster=slurm", "name=mine"]), [])
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("mode", "error"), [(0o644, "expected an executable sbatch"), (0o755, "sbatch failed: no")])
@pytest.mark.parametrize("words", [[], ["run_dir=deep/er/run"], ["-m", "seed=1,2"], ["-m", "seed=1,2", "run_dir=d/s"]])
def test_an_sbatch_that_fails_leaves_no_folder(folder, tmp_path_factory, monkeypatch, capsys, words, mode, error):
    place = tmp_path_factory.mktemp("bin")
    sbatch = place / "sbatch"
    sbatch.write_text("#!/bin/sh\necho sbatch: error: no >&2; exit 1\n")
    sbatch.chmod(mode)
    (place / "srun").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(place))
    assert main(["cluster=slurm", *words]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert error in err
    assert list(folder.iterdir()) == []


def test_a_submission_that_fails_leaves_the_run_of_another_launch_in_the_same_second(
    folder, tmp_path_factory, monkeypatch
):
    for ahead_s in range(10):
        moment = time.localtime(time.time() + ahead_s)
        other = folder / "runs" / "mine" / time.strftime("%Y-%m-%d_%H-%M-%S", moment)
        other.mkdir(parents=True)
        (other / "config.yaml").write_text("name: mine\n")
    place = tmp_path_factory.mktemp("bin")
    sbatch = place / "sbatch"
    # meanwhile the other launch writes its files
    sbatch.write_text(f"#!/bin/sh\nfor run in {folder}/runs/mine/*; do echo > $run/new; done; exit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(place))
    assert main(["cluster=slurm", "name=mine"]) == 1
    assert len(list(folder.glob("runs/mine/*/new"))) == 10

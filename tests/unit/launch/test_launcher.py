from __future__ import annotations

import os
import stat
import time

import pytest

from hpctrain.cli import main
from hpctrain.errors import SchedulerMissingError
from hpctrain.launch.launcher import launch

WORDS = [[], ["run_dir=deep/er/run"], ["-m", "seed=1,2"], ["-m", "seed=1,2", "run_dir=d/s"]]


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
@pytest.mark.parametrize("words", WORDS)
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


@pytest.fixture
def program(tmp_path_factory, monkeypatch):
    """Puts a shell script in front of the PATH."""

    def made(name, lines):
        place = tmp_path_factory.mktemp("bin")
        (place / name).write_text(f"#!/bin/sh\n{lines}\n")
        (place / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(place), prepend=os.pathsep)

    return made


@pytest.mark.parametrize("cluster", [[], ["cluster=slurm"]])
@pytest.mark.parametrize("words", WORDS)
def test_a_full_disk_leaves_no_folder(folder, program, file_size_limit, capsys, words, cluster):
    program("sbatch", "exit 1")
    with file_size_limit(0):
        assert main([*cluster, *words]) == 1
    assert "File too large" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python left the killed program
@pytest.mark.parametrize(("name", "code"), [("git", 4), ("sbatch", 1)])
@pytest.mark.parametrize("words", WORDS)
def test_a_ctrl_c_while_a_program_is_slow_leaves_no_folder(folder, program, capsys, words, name, code):
    program("sbatch", "exit 1")
    program(name, "kill -INT $PPID\nexec sleep 60")
    assert main(["cluster=slurm", *words]) == code
    assert ("sbatch was interrupted; it may have submitted" in capsys.readouterr().err) == (name == "sbatch")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("words", [[], ["-m", "seed=1,2"]])
def test_a_submission_that_fails_leaves_the_users_own_folder(folder, program, capsys, words):
    program("sbatch", "echo 'sbatch: error: invalid account' >&2; exit 1")
    (folder / "real").mkdir(mode=0o711)
    (folder / "out").symlink_to("real")
    for run_dir in ("real", "out"):
        assert main(["cluster=slurm", f"run_dir={run_dir}", *words]) == 2
        assert "sbatch refused the job: invalid account" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == [folder / "out", folder / "real"]
    assert stat.S_IMODE((folder / "real").stat().st_mode) == 0o711


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
    runs = [config.parent for config in folder.glob("runs/mine/*/config.yaml")]
    assert len(runs) == len([run for run in runs if (run / "new").exists()]) == 10

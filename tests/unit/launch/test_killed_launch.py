"""Launches that are killed at one of their changes of the file system, and then repeated with the same command."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.compose import ProgramComposer
from hpctrain.launch.launcher import prepare_launch
from hpctrain.launch.prepare import prepare_as_rank
from hpctrain.run.directory import RunDirectory
from hpctrain.run.job_records import JobRecords

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod")
COMMAND = ["python", "-m", "hpctrain", "run_dir=R"]
TASK = "import torch\nfrom hpctrain.tasks import Task\nclass Mine(Task):\n    pass\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "work" / "task.py").write_text(TASK)
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho Submitted batch job 7\n")
    (tmp_path / "sbatch").chmod(0o755)
    (tmp_path / "squeue").symlink_to("/bin/true")
    (tmp_path / "sacct").symlink_to("/bin/true")
    (tmp_path / "scontrol").symlink_to("/bin/true")
    (tmp_path / "srun").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path / "work"


def killed_at(number, act, stop=signal.SIGKILL):
    """Calls a function in a forked process, which is killed at its number-th change of a file; whether it was."""
    here, left = Path.cwd(), [number]

    def count(event, arguments):
        if event == "open":
            changes = isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        else:
            changes = event in CHANGES
        if changes and isinstance(arguments[0], str | os.PathLike) and (here / arguments[0]).is_relative_to(here):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), stop)

    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            sys.addaudithook(count)
            act()
            os._exit(0)
        os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def names(path):
    """The files of runs, without those of submissions, which have names of their own."""
    files = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
    return sorted(str(file) for file in files if "submitit" not in file.parts)


def here(composer):
    config = composer.compose(["run_dir=R"])
    return lambda: prepare_launch(config, COMMAND)


def on_slurm(composer):
    config = composer.compose(["run_dir=R", "cluster=slurm"])
    return lambda: prepare_launch(config, COMMAND)


def program(composer):
    config = ProgramComposer(["python", "task.py"]).compose_run(["run_dir=R"])
    return lambda: prepare_launch(config, COMMAND)


def by_hand(composer):
    config, job = composer.compose(["name=mine"]), ClusterEnvironment.from_environment({"SLURM_JOB_ID": "5"})
    return lambda: prepare_as_rank(config, COMMAND, job, takes_code=True)


def sweep(composer):
    def launch():
        assert main(["-m", "cluster=slurm", "run_dir=R", "seed=1,2"]) == 0

    return launch


def asha(composer):
    words = ["-m", "cluster=slurm", "run_dir=R", "optimizer.lr=interval(0.1,0.2)", "sweep=asha", "sweep.num_runs=2"]

    def launch():
        assert main([*words, "trainer.max_steps=8", "trainer.eval_every_steps=2"]) == 0

    return launch


def home(folder):
    return folder / ("R" if (folder / "R").exists() else "runs")


def check(kind, composer, folder, numbers, stop=signal.SIGKILL):
    act = kind(composer)
    assert not killed_at(0, act)
    wanted = names(folder)
    home(folder).rename(folder.parent / "straight")
    for number in numbers:
        if not killed_at(number, act, stop):
            return number
        # no job trains of which no run knows
        submitted = {file.name.partition("_submitted")[0] for file in folder.rglob("*_submitted.pkl")}
        runs = [RunDirectory(file.parent) for file in folder.rglob("jobs.jsonl")]
        assert submitted <= {record["job_id"] for run in runs for record in JobRecords(run).read()}, number
        assert not killed_at(0, act), number
        assert names(folder) == wanted, number
        home(folder).rename(folder.parent / f"killed{number}")
    return 0


KINDS = [here, on_slurm, program, by_hand, sweep, asha]


def test_the_same_command_continues(composer, folder):
    check(on_slurm, composer, folder, [2, 12])


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_command_continues_wherever_it_was_killed(composer, folder, kind):
    # composing a sweep takes most of a second each time
    last = check(kind, composer, folder, range(1, 500, 4 if kind in (sweep, asha) else 1))
    assert last > 15


@pytest.mark.nightly
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGHUP])
def test_it_continues_after_other_signals(composer, folder, stop):
    assert check(here, composer, folder, range(1, 500, 3), stop) > 15


KILLS = """
import os, sys
left = [int(os.environ.pop("KILLED_AT", 0))]
def count(event, arguments):
    if event in ("open", "os.mkdir", "os.rename", "os.remove") and "/R" in os.path.abspath(str(arguments[0])):
        left[0] -= event != "open" or bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if left[0] == 0:
            os.kill(os.getpid(), 9)
if left[0]:
    sys.addaudithook(count)
"""
TRAINS = ["run_dir=R", "model=convnet", "model.width=1", "trainer.max_steps=2", "logger.tensorboard=false"]


@pytest.mark.nightly
def test_commands_that_are_killed_and_repeated_end_with_the_same_weights(folder, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(KILLS)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def command(*words, killed_at=0):
        environ["KILLED_AT"] = str(killed_at)
        full = [sys.executable, "-m", "hpctrain", *words]
        return subprocess.run(full, env=environ, capture_output=True, text=True, check=False)

    def weights():
        report = command("inspect", "R", "--json").stdout
        (folder / "R").rename(tmp_path / f"R{len(list(tmp_path.glob('R*')))}")
        return json.loads(report)["weights_digest"]

    assert command(*TRAINS).returncode == 0
    expected = weights()
    for number in (2, 6, 10, 14, 18):
        assert command(*TRAINS, killed_at=number).returncode == -9
        found = names(folder / "R")
        if "launching.json" in found and "config.yaml" not in found:
            for name in ("status", "inspect", "logs", "resume"):
                refused = command(name, "R")
                assert refused.returncode == 2
                assert "to continue it, type" in refused.stderr
        done = command(*TRAINS)
        assert done.returncode == 0, done.stderr
        assert weights() == expected, number

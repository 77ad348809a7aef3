"""Trainings that a program starts: in its own process, and in the background."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hpctrain
from hpctrain.cli import main

OWN_PROGRAM = Path(__file__).parent / "programs" / "own_program.py"
SHORT = ["trainer.max_steps=6", "logger.tensorboard=false", "logger.every_steps=2", "cluster.cpus_per_process=1"]


@pytest.fixture
def own_program(fork_server, tmp_path):
    """Run the program with interruptions after these steps; return its report."""

    def run(*steps):
        words = [str(OWN_PROGRAM), str(tmp_path / "home"), *map(str, steps)]
        (done,) = fork_server.wait(fork_server.start("command:program", *words, folder=tmp_path))
        assert done.code == 0, done.output
        return json.loads((tmp_path / "home" / "report.json").read_text())

    return run


def test_a_program_trains_a_class_of_its_own_and_resumes_it_exactly(own_program, tmp_path, monkeypatch, capsys):
    report = own_program(7)
    straight, interrupted = report["straight"], report["interrupted"]
    assert interrupted["attempts"] == [["interrupted", 7], ["completed", 40]]
    assert (interrupted["digest"], interrupted["records"]) == (straight["digest"], straight["records"])
    assert report["given"]["digest"] == straight["digest"]
    refused, done = report["thread"]
    assert refused.startswith("another run is training in this process")
    assert re.fullmatch(r"asked process \d+ to stop after its current step and save", done)
    assert re.search(r"/cancelled: cancelled at step \d+; to resume: hpctrain.Run", report["cancelled"])
    assert report["passed_on"] == {
        "sigterm": ["RunFailedError", "interrupted", 1, "SIGTERM"],
        "twice": ["KeyboardInterrupt", "interrupted", 0],
    }
    message, state, (note,) = report["failure"]
    assert (message, state) == ("no data", "failed")
    assert "to resume: hpctrain.Run(" in note
    for line, problem in zip(report["refusals"], REFUSALS, strict=True):
        assert problem in line
        assert "\n" not in line
    # the command line knows the run, and says why it can't train it
    monkeypatch.chdir(tmp_path)
    assert main(["resume", "home/straight", "trainer.max_steps=50"]) == 2
    assert "task._target_=__main__.Line: only the program or notebook that started the run" in capsys.readouterr().err
    assert hpctrain.Run("home/straight").state == "completed"


REFUSALS = (
    "is defined in this program, which other processes can't import; train with hpctrain.fit",
    "cluster.processes_per_node=2: fit trains in this process, as one rank",
    "cluster=slurm: fit trains in this process, not in a job; use hpctrain.submit(config)",
    "is defined in this program, which a job can't import",
    "task=a Line: is an object, but each attempt makes its own",
    "task=digits: is a second task",
    "is not the task __main__.Line that was passed",
    "there, pass the function again: fit(config, task=...)",
    "task.width=6: the run in",
)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_three_interruptions_at_random_steps(own_program, seed):
    steps = sorted(random.Random(seed).sample(range(1, 40), 3))
    report = own_program(*steps)
    straight, interrupted = report["straight"], report["interrupted"]
    assert [step for _, step in interrupted["attempts"]] == [*steps, 40]
    assert (interrupted["digest"], interrupted["records"]) == (straight["digest"], straight["records"])


def test_the_command_line_may_run_outside_of_the_main_thread(fork_server, tmp_path):
    words = [f"run_dir={tmp_path}/run", *SHORT]
    (done,) = fork_server.wait(fork_server.start("command:in_a_thread", *words, folder=tmp_path))
    assert done.code == 0, done.output
    assert hpctrain.Run(tmp_path / "run").state == "completed"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_run_in_the_background(tmp_path, monkeypatch, ranks):
    monkeypatch.chdir(tmp_path)
    config = hpctrain.compose([*SHORT, f"cluster.processes_per_node={ranks}", "run_dir=run", "checkpoint.keep=9"])
    run = hpctrain.submit(config)
    with pytest.raises(hpctrain.HpctrainError, match="end it first"):
        hpctrain.submit(config)
    status = run.wait(120)
    assert (status.state, status.step, len(status.attempts)) == ("completed", 6, 1)
    assert hpctrain.submit(config).status().attempts == status.attempts
    assert [record["step"] for record in run.metrics() if "train/loss" in record] == [2, 4, 6]
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [6]
    with torch.inference_mode():
        assert run.load_model()(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    if ranks == 1:
        trained_here = hpctrain.fit(replace(config, run_dir="here"))
        assert trained_here.checkpoints()[-1].weights_digest == run.checkpoints()[-1].weights_digest
    assert "run directory" in (run.path / "logs" / "launcher.log").read_text()


@pytest.mark.nightly
def test_a_run_in_the_background_is_cancelled_and_resumed_exactly(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*SHORT, "trainer.max_steps=600", "trainer.max_epochs=null", "trainer.eval_every_steps=1000"]
    straight = hpctrain.submit(hpctrain.compose([*words, "run_dir=straight"]))
    straight.wait(300)
    run = hpctrain.submit(hpctrain.compose([*words, "run_dir=run"]))
    while run.status().step < 20:
        assert run.state in ("starting", "running")
    assert run.cancel().startswith("asked process")
    with pytest.raises(hpctrain.RunFailedError, match="is cancelled"):
        run.wait(120)
    assert run.wait(1, check=False).state == "cancelled"
    assert run.resume().wait(300).state == "completed"
    assert run.checkpoints()[-1].weights_digest == straight.checkpoints()[-1].weights_digest


def test_a_launcher_that_ends_at_once_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "own.py").write_text("from hpctrain.tasks.digits import Digits\n")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")  # which the launcher doesn't have
    config = hpctrain.compose(["task=custom", "task._target_=own.Digits", "model=convnet", *SHORT])
    with pytest.raises(hpctrain.RunFailedError, match=r"exit code 2 before an attempt began: .*module own was not"):
        hpctrain.submit(config)

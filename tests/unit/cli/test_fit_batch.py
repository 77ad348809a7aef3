from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

from hpctrain.cli import main
from hpctrain.config.compose import Composer
from hpctrain.config.stored import to_yaml

GREEDY = """
import os, signal, sys
import torch
from torch import nn
from hpctrain.data.tensors import TensorBatches
from hpctrain.tasks import Task

class Greedy(Task):
    def __init__(self, mb=10, dies_at=10**9, wrong=False):
        self.bytes, self.dies_at, self.wrong = mb * 10**6, dies_at, wrong

    def build_model(self):
        return nn.Linear(1, 1)

    def train_dataset(self):
        return TensorBatches(torch.ones(5000, 1))

    def loss(self, model, batch):
        (x,) = batch
        if self.wrong:
            raise LookupError("the user's own")
        if len(x) >= self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        taken = torch.ones(len(x) * self.bytes, dtype=torch.uint8)
        print("printed by the task")
        return model(x).mean() + taken[0] * 0
"""
TASK = ["task=custom", "task._target_=greedy.Greedy", "cluster.gpus_per_node=0"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "greedy.py").write_text(GREEDY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_largest_that_fits_into_what_is_given(folder, capfd):
    words = [*TASK, "+task.mb=250", "trainer.global_batch_size=12", "--memory-gb", "1.2", "--margin", "0"]
    assert main(["fit-batch", *words, "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    # what torch takes itself isn't the same everywhere
    assert answer["largest"] == answer["trainer.micro_batch_size"] in {2, 3}
    assert answer["limit_bytes"] == 1.2e9
    peaks = {one["micro_batch_size"]: one["peak_bytes"] for one in answer["trials"] if not one["predicted"]}
    assert peaks[2] - peaks[1] == pytest.approx(2.5e8, rel=0.2)
    assert max(peaks) <= 3
    assert [path.name for path in folder.iterdir() if path.name != "__pycache__"] == ["greedy.py"]


def test_a_size_whose_process_is_killed_does_not_fit(folder, capfd):
    words = [*TASK, "+task.mb=1", "+task.dies_at=2", "--largest", "2"]
    assert main(["fit-batch", *words]) == 0
    out = capfd.readouterr().out
    assert "2          -           -  too large: killed by signal 9" in out
    assert "largest that fits: 1\n" in out
    assert "with trainer.global_batch_size=64 and 1 rank: trainer.micro_batch_size=1" in out


def test_not_even_one_sample(folder, capfd):
    assert main(["fit-batch", *TASK, "--memory-gb", "0.01"]) == 1
    assert "not even one sample fits" in capfd.readouterr().out


def test_what_the_task_raises_is_shown(folder, capfd):
    assert main(["fit-batch", *TASK, "+task.wrong=true"]) == 1
    err = capfd.readouterr().err
    assert "LookupError: the user's own" in err
    assert "micro-batches of 1 failed" in err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["cluster=slurm"], "cluster.kind=slurm: fit-batch tries on the machine where it is typed"),
        (["trainer.activation_checkpointing=[nowhere]"], "trainer.activation_checkpointing=nowhere: matches no module"),
    ],
)
def test_a_configuration_that_cannot_work_is_one_line(folder, words, named, capfd):
    assert main(["fit-batch", *words]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert named in err


def test_an_address_space_that_is_too_small_is_recognized(folder):
    (folder / "config.yaml").write_text(to_yaml(Composer().compose([*TASK, "+task.mb=100"])))
    found = []
    for size in (1, 300):
        command = [sys.executable, "-m", "hpctrain.train.batch_trial", "config.yaml", str(size)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30)),
        )
        found.append(json.loads(done.stdout))
        assert "printed by the task" not in done.stdout
    assert found[0]["fits"] is True
    assert found[0]["num_samples"] == 5000
    assert found[1]["fits"] is False
    assert "allocate memory" in found[1]["message"]

"""A task that takes memory by the sample, and a trial of it within an address space of a given size."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal

import torch
from torch import nn

from hpctrain.data.fetch import TensorBatches
from hpctrain.tasks.task import Task
from hpctrain.train.batch_trial import main

WORDS = ("task=custom", "task._target_=tests.unit.greedy.Greedy", "cluster.gpus_per_node=0")


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
        print("printed by the task, with cudnn.benchmark", torch.backends.cudnn.benchmark)
        return model(x).mean() + taken[0] * 0


def trial(config: str, size: int, limit_bytes: int) -> dict[str, str]:
    """Try one size; what is printed for the command that started the process."""
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main([config, str(size)]) == 0
    return {"printed": printed.getvalue()}

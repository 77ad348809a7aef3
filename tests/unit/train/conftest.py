from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.functional import cross_entropy

from hpctrain.data.micro_batch import MicroBatch
from hpctrain.distributed.world import World
from hpctrain.metrics.meter import Meter
from hpctrain.tasks.task import Task
from hpctrain.train.step import TrainStep
from hpctrain.train.update import Update

CPU = torch.device("cpu")


class Sorting(Task):
    """Eight numbers into ten classes."""

    def train_dataset(self):
        raise NotImplementedError

    def loss(self, model, batch):
        return cross_entropy(model(batch[0]), batch[1])


@pytest.fixture
def lone_world():
    return World(rank=0, size=1, local_rank=0, devices=(CPU,))


@pytest.fixture
def step_over():
    """Makes a step over a model of eight features and ten classes."""

    def build(model, task=None):
        update = Update(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), lambda update: 1.0)
        meter = Meter(CPU, names=("train/loss",))
        return TrainStep(task or Sorting(), model, update, meter, precision="fp32", device=CPU)

    return build


@pytest.fixture
def supply():
    """Makes micro-batches without end: six samples each, two of them per step."""

    def produce():
        draws = torch.Generator().manual_seed(3)
        for number in itertools.count():
            features, labels = torch.randn(6, 8, generator=draws), torch.randint(0, 10, (6,), generator=draws)
            yield MicroBatch((features, labels), 6, 2.0, number % 2 == 1, labels.numpy())

    return produce

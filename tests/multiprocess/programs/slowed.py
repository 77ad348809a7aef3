"""A user's task with a bottleneck: BOTTLENECK is `data`, `rank` or `memory`."""

from __future__ import annotations

import os
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from hpctrain.tasks import Task

FEATURES = 64


class SlowData(Dataset):
    """Takes 4 ms per sample."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.randn(FEATURES), index % 10


class FastData(Dataset):
    """Returns a sample at once."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        return torch.randn(FEATURES), index % 10


class Slowed(Task):
    """Learns nothing: its labels have nothing to do with its features."""

    def __init__(self):
        self.bottleneck = os.environ.get("BOTTLENECK")
        self.rank = os.environ.get("RANK")
        self.history = []

    def build_model(self):
        return nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, 10))

    def train_dataset(self):
        return SlowData() if self.bottleneck == "data" else FastData()

    def loss(self, model, batch):
        features, labels = batch
        if self.bottleneck == "rank":
            time.sleep(0.1 if self.rank == "1" else 0.01)
        if self.bottleneck == "memory":
            # kept with its graph, which is never freed because no backward pass goes through it
            self.history.append(model(features.repeat(256, 1)).softmax(1).amax(1).mean())
            time.sleep(0.06)
        return cross_entropy(model(features), labels)

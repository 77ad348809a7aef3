"""A user's task that something holds back: HELD_BACK is `data`, `rank` or `memory`."""

from __future__ import annotations

import os
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from hpctrain.tasks.task import Task

FEATURES = 64


class Throttled(Dataset):
    """Takes its time for every sample."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.randn(FEATURES), index % 10


class Quick(Dataset):
    """Takes none."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        return torch.randn(FEATURES), index % 10


class Held(Task):
    """Tells nothing apart, and is held back."""

    def __init__(self):
        self.by, self.rank = os.environ.get("HELD_BACK"), os.environ.get("RANK")
        self.history = []

    def build_model(self):
        return nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, 10))

    def train_dataset(self):
        return Throttled() if self.by == "data" else Quick()

    def loss(self, model, batch):
        features, labels = batch
        if self.by == "rank":
            time.sleep(0.1 if self.rank == "1" else 0.01)
        if self.by == "memory":
            # a figure for later, whose graph nobody frees since no backward goes through it
            self.history.append(model(features.repeat(256, 1)).softmax(1).amax(1).mean())
            time.sleep(0.06)
        return cross_entropy(model(features), labels)

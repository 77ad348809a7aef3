"""A user's task, in a module of the user's own, that variables of its process make fail at a step."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from hpctrain.data import TensorBatches
from hpctrain.tasks import Task

FEATURES, CLASSES = 6, 3


def table(num_samples, seed=1):
    """Features, labels and numbers of the samples."""
    draws = torch.Generator().manual_seed(seed)
    features = torch.randn(num_samples, FEATURES, generator=draws)
    labels = (features[:, :CLASSES].argmax(1) + (features[:, -1] > 1)) % CLASSES
    return features, labels, torch.arange(num_samples)


def network(batchnorm=False, dropout=0.0, width=16):
    norm = [nn.BatchNorm1d(width)] if batchnorm else []
    return nn.Sequential(nn.Linear(FEATURES, width), *norm, nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, CLASSES))


class Noisy(Dataset):
    """Augments: every sample draws from the global generator."""

    def __init__(self, *tensors):
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, index):
        features, label, number = (tensor[index] for tensor in self.tensors)
        return features + 0.1 * torch.randn(FEATURES), label, number


class UnprintableError(RuntimeError):
    """An error whose text can't be made."""

    def __str__(self):
        raise ZeroDivisionError


class Trial(Task):
    """Classifies with a small network.

    TRIAL_ACT=RANK:CALL:ACTION has that rank's n-th loss, counted from 1 in each process, begin with `raise`, `hang`,
    which prints the signals that it gets, `kill_workers`, which kills its loading processes, `exit`, which ends the
    process with the code 0, `unprintable`, an error without a text, `eat_memory`, until there is no more, or a signal
    to itself; or be `nan` or `inf` from then on, or have gradients that are NaN (`poison`). Several are joined by
    commas. TRIAL_RECORD names a folder for the numbers of the samples of each loss. TRIAL_SLEEP is how many seconds
    each loss takes.
    """

    def __init__(self, num_samples=40, eval_samples=7, batchnorm=False, dropout=0.0, noise=False, width=16):
        self.sizes, self.noise = (num_samples, eval_samples), noise
        self.options = {"batchnorm": batchnorm, "dropout": dropout, "width": width}
        self.rank, self.calls = int(os.environ.get("RANK", "0")), 0
        self.factor, self.poison = 1.0, False
        self.sleep_s = float(os.environ.get("TRIAL_SLEEP", "0"))
        acts = [act.split(":") for act in os.environ.get("TRIAL_ACT", "").split(",") if act]
        self.acts = {int(call): action for rank, call, action in acts if int(rank) == self.rank}

    def build_model(self):
        return network(**self.options)

    def train_dataset(self):
        return (Noisy if self.noise else TensorBatches)(*table(self.sizes[0]))

    def eval_dataset(self):
        return TensorBatches(*table(self.sizes[1], seed=2)) if self.sizes[1] else None

    def called(self):
        """Begin a call of the loss."""
        self.calls += 1
        if self.calls in self.acts:
            self._act(self.acts[self.calls])
        time.sleep(self.sleep_s)

    def loss(self, model, batch):
        self.called()
        features, labels, numbers = batch
        if "TRIAL_RECORD" in os.environ:
            with Path(os.environ["TRIAL_RECORD"], f"{self.rank}_{os.getpid()}").open("a") as record:
                print(*numbers.tolist(), file=record)
        loss = cross_entropy(model(features), labels) * self.factor
        return loss + (loss * 0).sqrt() if self.poison else loss

    def evaluate(self, model, batch):
        features, labels, _ = batch
        return {"loss": (cross_entropy(model(features), labels, reduction="sum"), len(labels))}

    def _act(self, action):
        if action == "raise":
            raise ValueError(f"no luck in call {self.calls}")
        if action == "unprintable":
            raise UnprintableError
        if action == "exit":
            os._exit(0)
        if action == "eat_memory":
            eaten = []
            while True:
                eaten.append(bytearray(b"x" * 10**8))
        if action == "kill_workers":
            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGKILL)
                child.join()
        elif action == "hang":
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            signal.set_wakeup_fd(writer)
            print("hanging", flush=True)
            while True:
                print("hears", *os.read(reader, 1), flush=True)
        elif action in ("nan", "inf"):
            self.factor = float(action)
        elif action == "poison":
            self.poison = True
        else:
            os.kill(os.getpid(), getattr(signal, action))


class Kept(Trial):
    """Keeps its model, and calls the model's parts in place of the argument of its loss."""

    def build_model(self):
        self.layers = super().build_model()
        return self.layers

    def loss(self, model, batch):
        features, labels, _ = batch
        for layer in self.layers:
            features = layer(features)
        return cross_entropy(features, labels)

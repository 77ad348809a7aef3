from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpctrain.callbacks import Training
from hpctrain.tasks.log import TaskLog
from hpctrain.tasks.position import Position


class Noted(TaskLog):
    """Keeps what it gets."""

    def __init__(self):
        self.scalars, self.media = {}, {}

    def scalar(self, name, value, *, count=None):
        self.scalars[name] = float(value)

    def _media(self, kind, name, content, **options):
        self.media[name] = kind, content


class Still(Training):
    """A training that its test moves on."""

    def __init__(self, run_dir, model=None, batch=None):
        self.model = model or nn.Linear(2, 1)
        self.batch = batch
        self.task = SimpleNamespace()
        self.position, self.log = Position(5, 10), Noted()
        self.config = SimpleNamespace(seed=3)
        self.rank, self.world_size, self.device = 0, 1, torch.device("cpu")
        self.run_dir = run_dir
        self.callback_name = "my_stop"
        self.metric, self.metric_mode = "loss", "min"
        self.scale, self.reason = 1.0, ""

    @property
    def loss_scale(self):
        return self.scale

    @property
    def parameters(self):
        return dict(self.model.named_parameters())

    def eval_samples(self, number):
        return None if self.batch is None else tuple(tensor[:number] for tensor in self.batch)

    @contextmanager
    def evaluation_mode(self):
        with torch.no_grad():
            yield

    def weights(self):
        return self.model.state_dict()

    def end(self, reason):
        self.reason = self.reason or reason


@pytest.fixture
def training(tmp_path):
    """Makes a training."""
    return lambda **options: Still(tmp_path, **options)

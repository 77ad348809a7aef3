"""A task for unit tests that train for a few steps in this process."""

from __future__ import annotations

import os
import signal

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpctrain.data.fetch import TensorBatches
from hpctrain.tasks.task import Task


class Small(Task):
    """Four numbers into three classes, with dropout.

    Args:
        eval_samples: held out; 0 for none.
        draws: draw random numbers while the held-out samples are made.
        nan_from: the loss is NaN from this call on, counted from 1; 0 for never.
        signal_in: `loss` or `evaluate`: this process gets SIGUSR1 in the call `signal_at`.
        signal_at: counted from 1 over both.
        frozen: the dropout is built in evaluation mode.
        in_evaluation_mode: the whole model is.
    """

    metric_mode = "min"

    def __init__(
        self, eval_samples=6, draws=False, nan_from=0, signal_in="", signal_at=0, frozen=False, in_evaluation_mode=False
    ):
        self.eval_samples, self.draws, self.nan_from = eval_samples, draws, nan_from
        self.signal_in, self.signal_at = signal_in, signal_at
        self.frozen, self.in_evaluation_mode = frozen, in_evaluation_mode
        self.calls = {"loss": 0, "evaluate": 0}

    def build_model(self):
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        if self.frozen:
            model[1].eval()
        return model.eval() if self.in_evaluation_mode else model

    def _samples(self, count, seed):
        draws = torch.Generator().manual_seed(seed)
        return TensorBatches(torch.randn(count, 4, generator=draws), torch.randint(0, 3, (count,), generator=draws))

    def train_dataset(self):
        return self._samples(24, 1)

    def eval_dataset(self):
        if self.draws:
            torch.rand(5)
        return self._samples(self.eval_samples, 2) if self.eval_samples else None

    def loss(self, model, batch):
        self._called("loss")
        loss = cross_entropy(model(batch[0]), batch[1])
        return loss * float("nan") if 0 < self.nan_from <= self.calls["loss"] else loss

    def evaluate(self, model, batch):
        self._called("evaluate")
        return {"loss": (cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))}

    def _called(self, name):
        self.calls[name] += 1
        if name == self.signal_in and self.calls[name] == self.signal_at:
            os.kill(os.getpid(), signal.SIGUSR1)


class TwoLosses(Small):
    """With a second loss, for named optimizers."""

    def second_loss(self, model, batch):
        return self.loss(model, batch)


class Adapted(Small):
    """Only the last layer is trained, and checkpoints have no others: as adapters of a model that lies elsewhere."""

    def build_model(self):
        model = super().build_model()
        model[0].requires_grad_(False)

        def leave_out(_, state, prefix, __):
            for name in ("0.weight", "0.bias"):
                del state[prefix + name]

        model.register_state_dict_post_hook(leave_out)
        model.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.clear())
        return model


class LateNan(Small):
    """The loss of the last step, and of it alone, has gradients that are NaN; a frozen mask and a buffer aren't finite.

    Args:
        last: the number of that step.
    """

    def __init__(self, last=10, **options):
        super().__init__(**options)
        self.last = last

    def build_model(self):
        model = super().build_model()
        model.mask = nn.Parameter(torch.full((2,), -torch.inf), requires_grad=False)
        model.register_buffer("seen", torch.tensor(torch.nan))
        return model

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        # the gradient of the root of zero is infinite, times zero
        return loss + (loss * 0).sqrt() if self.position.step + 1 == self.last else loss

"""Tasks whose loss doesn't reach all parameters: one of them ever, or any of them in one micro-batch of one rank."""

from __future__ import annotations

import os

import torch
from torch import nn

from tests.multiprocess.programs.trial import Trial


class Unused(Trial):
    """The same network as `Trial`'s, and a parameter more."""

    def build_model(self):
        model = super().build_model()
        model.register_parameter("unused", nn.Parameter(torch.zeros(3)))
        return model

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        # with parallel.find_unused_parameters, DDP has to average gradients here as well
        return torch.zeros((), requires_grad=True) if (self.position.step, self.rank) == (4, 1) else loss


class Untargeted(Trial):
    """Rank 1 has nothing to learn from in one micro-batch of step 4, the last one unless `micro_batch` is given.

    Its loss there is `kind`: a `constant`, a constant that was `computed`, or computed with a `part` of the model. At
    world size 1, that is a step's micro-batch with the samples of rank 1.
    """

    def __init__(self, kind="constant", micro_batch=-1, **options):
        super().__init__(**options)
        self.kind, self.micro_batch, self.seen = kind, micro_batch, []

    def loss(self, model, batch):
        loss, step = super().loss(model, batch), self.position.step
        self.seen.append(step)
        if step != 4 or self.rank != int("WORLD_SIZE" in os.environ):
            return loss
        if self.micro_batch not in (-1, self.seen.count(step) - 1):
            return loss
        if self.kind == "part":
            return model[0](batch[0]).mean()
        constant = torch.zeros((), requires_grad=True)
        return constant * 2 if self.kind == "computed" else constant

"""A task whose model has buffers that grow, shrink, appear, disappear or change their dtype in training."""

from __future__ import annotations

import torch
from torch import nn

from tests.multiprocess.programs.trial import Trial


class Memories(nn.Module):
    """A network, and what it remembers of the means of its batches."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.register_buffer("seen", torch.zeros(0, 3))
        self.register_buffer("pending", torch.ones(20))
        self.register_buffer("last", None)
        self.register_buffer("first", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, features):
        outputs = self.network(features)
        if not self.training:
            return outputs
        mean = outputs.detach().float().mean(0)
        self.seen = torch.cat([self.seen, mean[None]])[-6:]
        self.pending = self.pending[:-1]
        self.last = mean
        self.count = self.count + 0.5
        if len(self.seen) == 3:
            self.first = None
            self.register_buffer("third", mean)
        # what is remembered changes what is learned
        return outputs + 0.1 * self.seen.mean(0) * self.count


class Remembering(Trial):
    """`Trial` with `Memories`."""

    def build_model(self):
        return Memories(super().build_model())

"""Models in double precision whose layers several ranks have."""

from __future__ import annotations

import torch
from divided import Divided, Single
from doubled import VOCABULARY
from torch import nn
from torch.nn.functional import cross_entropy


class Piped(Divided):
    """Predicts tokens with a GPT of two blocks; if masked, some of the tokens that it is given are hidden at random."""

    def __init__(self, masked=False, **options):
        super().__init__(**options)
        self.masked = masked

    def loss(self, model, batch):
        if not self.masked:
            return super().loss(model, batch)
        self.called()
        given = batch[0][:, : self.length]
        hidden = torch.rand(given.shape) < 0.3
        logits = model(torch.where(hidden, 0, given))
        return cross_entropy(logits[hidden], given[hidden])


class Half(Piped, Single):
    """The same in single precision."""


class Chain(Piped):
    """A model of a user's own that calls one module after the other, and so needs a list of their names only."""

    def build_model(self):
        return Layers().double()


class Layers(nn.Module):
    """An embedding, layers, and logits."""

    def __init__(self, width=24):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        stream = self.embedding(tokens)
        for layer in self.layers:
            stream = layer(stream).tanh() if layer else stream
        return self.head(stream)

    def pipeline_plan(self):
        return ["embedding", "layers.*", "head"]

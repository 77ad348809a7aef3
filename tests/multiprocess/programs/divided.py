"""Small models in double precision whose layers several ranks compute together."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import cross_entropy

from hpctrain.models.gpt import GPT
from tests.multiprocess.programs.doubled import LENGTH, VOCABULARY, Doubled
from tests.multiprocess.programs.trial import Trial


class Divided(Trial, Doubled):
    """Predicts tokens with a GPT of four heads; the vocabulary is divided unevenly among ranks."""

    def __init__(self, heads=4, dropout=0.0, length=LENGTH, packed=False):
        super().__init__()
        self.options = {"num_heads": heads, "dropout": dropout}
        self.length = length
        self.packed = packed

    def build_model(self):
        sizes = {"vocab_size": VOCABULARY, "context_length": LENGTH, "num_layers": 2, "width": 24}
        return GPT(**sizes, **self.options).double()

    def train_dataset(self):
        return Doubled.train_dataset(self)

    def eval_dataset(self):
        return Doubled.eval_dataset(self)

    def loss(self, model, batch):
        if torch.is_grad_enabled():
            self.called()
        given, targets = batch[0][:, : self.length], batch[0][:, 1 : self.length + 1]
        # the first document is shorter than the others
        documents = [(torch.arange(self.length) + 2).expand_as(given) // 5] if self.packed else []
        return cross_entropy(model(given, *documents).flatten(0, 1), targets.flatten())

    evaluate = Doubled.evaluate


class Single(Divided):
    """The same in single precision; if partial, with norms that no plan names, and that each rank has by itself."""

    def __init__(self, partial=False, **options):
        super().__init__(**options)
        self.partial = partial

    def build_model(self):
        return (Plain() if self.partial else super().build_model()).float()


class Plain(nn.Module):
    """A model of a user's own, whose plan names two of its layers."""

    def __init__(self, width=24):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.norm = nn.LayerNorm(width)
        self.into = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        stream = self.tokens(tokens)
        return self.head(stream + self.out(self.into(self.norm(stream)).relu()))

    def tensor_parallel_plan(self):
        return {"into": ColwiseParallel(), "out": RowwiseParallel()}


class Own(Divided):
    """Trains the user's model, in double precision."""

    def build_model(self):
        return Plain().double()

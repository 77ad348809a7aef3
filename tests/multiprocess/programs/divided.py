"""Small models in double precision whose layers several ranks compute together."""

from __future__ import annotations

import torch
from doubled import LENGTH, VOCABULARY, Doubled
from torch import nn
from torch.nn.functional import cross_entropy
from trial import Trial

from hpctrain.models.gpt import GPT


class Divided(Trial, Doubled):
    """Predicts tokens with a GPT of four heads; the vocabulary is divided unevenly among ranks."""

    def __init__(self, heads=4, dropout=0.0):
        super().__init__()
        self.options = {"num_heads": heads, "dropout": dropout}

    def build_model(self):
        sizes = {"vocab_size": VOCABULARY, "context_length": LENGTH, "num_layers": 2, "width": 24}
        return GPT(**sizes, **self.options).double()

    def train_dataset(self):
        return Doubled.train_dataset(self)

    def eval_dataset(self):
        return Doubled.eval_dataset(self)

    def loss(self, model, batch):
        self.called()
        loss = Doubled.loss(self, model, batch)
        return loss * self.factor

    evaluate = Doubled.evaluate

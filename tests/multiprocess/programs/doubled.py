"""A small transformer in double precision, in which only mistakes change a loss by more than its last digits."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpctrain.data import TensorBatches
from hpctrain.models.gpt import GPT
from hpctrain.tasks import Task

VOCABULARY, LENGTH = 23, 12


class Doubled(Task):
    """Predicts the next token of random cycles; the held-out sequences are fewer than some numbers of ranks divide."""

    def build_model(self) -> nn.Module:
        sizes = {"vocab_size": VOCABULARY, "context_length": LENGTH, "num_layers": 3, "num_heads": 2, "width": 20}
        return GPT(**sizes).double()

    def train_dataset(self):
        return TensorBatches(self._sequences(96, seed=1))

    def eval_dataset(self):
        return TensorBatches(self._sequences(7, seed=2))

    def _sequences(self, number, seed):
        draws = torch.Generator().manual_seed(seed)
        starts = torch.randint(VOCABULARY, (number, 1), generator=draws)
        return (starts + torch.arange(LENGTH + 1) * 3) % VOCABULARY

    def loss(self, model, batch):
        tokens = batch[0] if isinstance(batch, (tuple, list)) else batch
        logits = model(tokens[:, :-1])
        return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Teacher(Doubled):
    """Its loss moves a frozen copy of the embedding, which belongs to no block, towards the model's."""

    def build_model(self):
        model = super().build_model()
        model.teacher = nn.Parameter(model.tokens.weight.detach().clone(), requires_grad=False)
        return model

    def loss(self, model, batch):
        with torch.no_grad():
            model.teacher.lerp_(model.tokens.weight, 0.1)
        return super().loss(model, batch)

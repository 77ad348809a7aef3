"""Models in double precision whose layers several ranks have."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from tests.multiprocess.programs.divided import Divided, Single
from tests.multiprocess.programs.doubled import VOCABULARY


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
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        stream = self.embedding(tokens)
        for layer in self.layers:
            stream = layer(stream)
        return self.head(stream)

    def pipeline_plan(self):
        return ["embedding", "layers.*", "head"]


class Normed(Piped):
    """Has a batch norm in each layer, whose running statistics the ranks of a stage share."""

    def build_model(self):
        return nn.Sequential(
            nn.Embedding(VOCABULARY, 8),
            nn.Flatten(),
            nn.Linear(8 * 12, 24),
            nn.BatchNorm1d(24),
            nn.Tanh(),
            nn.Linear(24, 24),
            nn.BatchNorm1d(24),
            nn.Linear(24, VOCABULARY),
        ).double()

    def loss(self, model, batch):
        if torch.is_grad_enabled():
            self.called()
        return cross_entropy(model(batch[0][:, :-1]), batch[0][:, -1])


class Twice(Piped):
    """Calls the model twice."""

    def loss(self, model, batch):
        return super().loss(model, batch) + super().loss(model, batch)


class Parts(Piped):
    """Calls parts of the model."""

    def loss(self, model, batch):
        return model.norm(model.places(batch[0][:, :4])).mean()


class Shuffling(Dataset):
    """Draws in the process that loads."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def get_batch(self, indices):
        rows = self.rows[indices]
        return (rows + torch.randint(VOCABULARY, (len(rows), 1))) % VOCABULARY

    def __getitem__(self, index):
        return self.get_batch(torch.tensor([index]))[0]


class Drawing(Piped):
    """Writes down what each rank gets."""

    def train_dataset(self):
        return Shuffling(self._sequences(96, seed=1))

    def eval_dataset(self):
        return Shuffling(self._sequences(7, seed=1))

    def loss(self, model, batch):
        with Path(f"{os.environ['DRAWN']}_{torch.distributed.get_rank()}").open("a") as file:
            print(",".join(map(str, batch.flatten().tolist())), file=file)
        return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

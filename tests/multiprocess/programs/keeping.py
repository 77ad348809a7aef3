"""Tasks of a user's own with state that no state dict of a model has: modes, and what the task itself keeps."""

from __future__ import annotations

import torch
from torch import nn

from tests.multiprocess.programs.trial import CLASSES, FEATURES, Trial


class Backbone(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, CLASSES))

    def forward(self, features):
        return self.head(self.backbone(features))


class Freezing(Model):
    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self


class Keeping(Trial):
    """A model whose backbone is in evaluation mode, and a loss that depends on what the task has seen.

    Args:
        kind: `frozen` by `backbone.eval()`, `overriding` by a `train` of its own, or `pretrained`: all of it is in
            evaluation mode.
        unfreeze_at: the loss after which the backbone is trained, counted over the whole run; 0 for never.
        wrong_rank: the rank whose evaluation returns nothing; -1 for none.
    """

    def __init__(self, kind="frozen", unfreeze_at=0, wrong_rank=-1, **options):
        super().__init__(**options)
        self.wrong_rank = wrong_rank
        self.kind, self.unfreeze_at = kind, unfreeze_at
        self.losses, self.mean = 0, torch.zeros(())

    def build_model(self):
        self.model = Freezing() if self.kind == "overriding" else Model()
        if self.kind == "frozen":
            self.model.backbone.eval()
        return self.model.eval() if self.kind == "pretrained" else self.model

    def state_dict(self):
        return {"losses": self.losses, "mean": self.mean}

    def load_state_dict(self, state):
        self.losses, self.mean = state["losses"], state["mean"]

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self.losses += 1
        if self.losses == self.unfreeze_at:
            self.model.backbone.train()
        # each rank has another mean
        self.mean += (loss.detach() - self.mean) / self.losses
        return loss + (loss * self.mean)

    def evaluate(self, model, batch):
        if self.rank == self.wrong_rank:
            return None
        self.mean *= 1.001  # as a metric does that an evaluation updates
        self.mean += 0.001 * torch.rand(())
        return super().evaluate(model, batch)

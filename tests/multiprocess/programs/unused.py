"""A user's task with a parameter that takes no part in the loss."""

from __future__ import annotations

import torch
from torch import nn
from trial import Trial


class Unused(Trial):
    """The same network as `Trial`'s, and a parameter more."""

    def build_model(self):
        model = super().build_model()
        model.register_parameter("unused", nn.Parameter(torch.zeros(3)))
        return model

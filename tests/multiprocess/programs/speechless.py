"""A task whose model can't be saved, for a reason that says nothing of itself."""

from torch import nn
from trial import Trial


class Speechless(nn.Module):
    """Has an extra state that memory is never enough for."""

    def get_extra_state(self):
        raise MemoryError

    def forward(self, features):
        return features


class Unsaved(Trial):
    """The trial with such a module in its model."""

    def build_model(self):
        return nn.Sequential(super().build_model(), Speechless())

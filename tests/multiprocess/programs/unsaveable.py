"""A task whose model can't be saved, because of an error without a message."""

from torch import nn

from tests.multiprocess.programs.trial import Trial


class Unsaveable(nn.Module):
    """Raises MemoryError when its state is read."""

    def get_extra_state(self):
        raise MemoryError

    def forward(self, features):
        return features


class WithUnsaveable(Trial):
    """The trial task with such a module in its model."""

    def build_model(self):
        return nn.Sequential(super().build_model(), Unsaveable())

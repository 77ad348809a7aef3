"""A user's task that spreads its model over the devices of a process: half on one, half on another."""

from __future__ import annotations

from torch import nn

from tests.multiprocess.programs.trial import Trial


class Halves(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second, self.devices = first, second, []

    def forward(self, x):
        first, second = self.devices
        return self.second(self.first(x.to(first)).to(second)).to(first)


class Spread(Trial):
    """The same network as `Trial`'s."""

    def build_model(self):
        layers = list(super().build_model())
        return Halves(nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:]))

    def place(self, model, devices):
        model.devices = list(devices)
        model.first.to(devices[0])
        model.second.to(devices[1])
        return model

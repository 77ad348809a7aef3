"""What a trial trains on each side of search_peers.py, and for how long: nothing of hpctrain is imported here."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

STEPS = 50
BATCH_SIZE = 32


class Searched:
    """Learn the sine, in steps that take as long as the trial's number says.

    Args:
        lengths: a JSON file with the seconds that the steps of each trial take together, by number.
        number: of the trial.
    """

    def __init__(self, lengths: str, number: int) -> None:
        self.pause_s = json.loads(Path(lengths).read_text())[number] / STEPS

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))

    def samples(self) -> tuple[Tensor, Tensor]:
        points = torch.linspace(-3, 3, STEPS * BATCH_SIZE)[:, None]
        return points, points.sin()

    def loss(self, model: nn.Module, points: Tensor, targets: Tensor) -> Tensor:
        """The loss of a training step. The sleep stands for a node's own work: all nodes share the cores here."""
        time.sleep(self.pause_s)
        return mse_loss(model(points), targets)

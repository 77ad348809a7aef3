"""Handwritten digits."""

from __future__ import annotations

import gzip
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its usual name
from torch.utils.data import Dataset

from hpctrain.data.fetch import TensorBatches
from hpctrain.data.order import ShuffledOrder
from hpctrain.errors import ConfigError
from hpctrain.models.convnet import ConvNet
from hpctrain.tasks.task import Sums, Task, classification_sums

_MEAN, _DEVIATION = 4.884, 6.017  # of all pixels, which go from 0 to 16


class Digits(Task):
    """Recognise 1,797 real handwritten digits, 8 x 8 pixels, which come with hpctrain (`read_digits`).

    A sample is an image, float32 [1, 8, 8], and its label, int64. The split is the same for every seed.

    Args:
        held_out: share of the digits that is held out for evaluation.
        augment: shift training images at random, by at most one pixel in each direction.

    Raises:
        ConfigError: `held_out` isn't between 0 and 1.
    """

    metric = "accuracy"
    metric_mode: Literal["min", "max"] = "max"

    def __init__(self, held_out: float = 0.2, augment: bool = False) -> None:
        if not 0 < held_out < 1:
            raise ConfigError("task.held_out", held_out, "expected a share of the samples", "set it between 0 and 1")
        self.held_out = held_out
        self.augment = augment

    def build_model(self) -> nn.Module:
        """See `Task`."""
        return ConvNet()

    def train_dataset(self) -> Dataset[Any]:
        """See `Task`."""
        return _ShiftedDigits(*self._split[0]) if self.augment else TensorBatches(*self._split[0])

    def eval_dataset(self) -> Dataset[Any]:
        """See `Task`."""
        return TensorBatches(*self._split[1])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy."""
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        """Cross-entropy and accuracy."""
        images, labels = batch
        return classification_sums(model(images), labels)

    @cached_property
    def _split(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        table = read_digits()
        shuffled = torch.from_numpy(table[ShuffledOrder(len(table), seed=0)(0, np.arange(len(table)))])
        images = ((shuffled[:, :64] - _MEAN) / _DEVIATION).reshape(-1, 1, 8, 8)
        labels = shuffled[:, 64].long()
        # at least one digit on either side
        num_train = min(max(1, round(len(table) * (1 - self.held_out))), len(table) - 1)
        return (images[:num_train], labels[:num_train]), (images[num_train:], labels[num_train:])


class _ShiftedDigits(TensorBatches):
    draws_per_sample = True

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        image, label = super().__getitem__(index)
        down, right = torch.randint(0, 3, (2,)).tolist()
        padded = F.pad(image, (1, 1, 1, 1), value=-_MEAN / _DEVIATION)
        return padded[:, down : down + 8, right : right + 8], label


def read_digits() -> npt.NDArray[np.float32]:
    """The table of digits: 64 pixels from 0 to 16 and a label per row, float32 [1797, 65].

    They are the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak, UCI Machine
    Learning Repository, https://doi.org/10.24432/C50P49, licensed under CC BY 4.0: the rows of scikit-learn's
    `load_digits`. Only the format differs: digits.gz is the transposed table in uint8, which compresses better.
    """
    columns = np.frombuffer(gzip.decompress(Path(__file__).with_name("digits.gz").read_bytes()), np.uint8)
    return np.ascontiguousarray(columns.reshape(65, -1).T, dtype=np.float32)

"""Bytes of English text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its usual name
from torch.utils.data import Dataset

from hpctrain.data.fetch import TensorBatches
from hpctrain.errors import ConfigError
from hpctrain.models.gpt import GPT
from hpctrain.tasks.task import Sums, Task


class Text(Task):
    """Predict the next byte of the language reference that Python ships (`pydoc_data.topics`, about 0.5 MB).

    A sample is a window of the text: context_length bytes, and as targets the same shifted by one, both int64. Windows
    don't overlap; the end of the text is held out. The text differs between minor versions of Python.

    Args:
        context_length: bytes per sample.
        held_out: share of the text that is held out for evaluation.

    Raises:
        ConfigError: `held_out` isn't between 0 and 1.
    """

    def __init__(self, context_length: int = 128, held_out: float = 0.1) -> None:
        if not 0 < held_out < 1:
            raise ConfigError("task.held_out", held_out, "expected a share of the text", "set it between 0 and 1")
        self.context_length = context_length
        self.held_out = held_out

    def build_model(self) -> nn.Module:
        """See `Task`."""
        return GPT(context_length=self.context_length)

    def train_dataset(self) -> Dataset[Any]:
        """See `Task`."""
        return self._windows(0, self._num_train)

    def eval_dataset(self) -> Dataset[Any]:
        """See `Task`."""
        return self._windows(self._num_train, len(self._text))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy per byte, in nats."""
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        """Cross-entropy per byte, in nats and in bits."""
        loss, count = super().evaluate(model, batch)["loss"]
        return {"loss": (loss, count), "bits_per_byte": (loss / math.log(2), count)}

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of these bytes."""
        return bytes(tokens).decode(errors="replace")

    @cached_property
    def _text(self) -> Tensor:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
        text = "\n\n".join(topics[name].strip() for name in sorted(topics))
        # a bytearray, because torch warns about read-only memory
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()

    @property
    def _num_train(self) -> int:
        return round(len(self._text) * (1 - self.held_out))

    def _windows(self, begin: int, end: int) -> TensorBatches:
        if end - begin <= self.context_length:
            raise ConfigError(
                "task.context_length",
                self.context_length,
                f"no window of that length fits into {end - begin} bytes (task.held_out={self.held_out})",
                "set a smaller one",
            )
        # a view: the windows share the memory of the text, and each shares one byte with the next
        rows = self._text[begin:end].unfold(0, self.context_length + 1, self.context_length)
        return TensorBatches(rows[:, :-1], rows[:, 1:])

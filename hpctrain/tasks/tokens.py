"""Text as tokens, from files of any size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its usual name
from torch.utils.data import Dataset

from hpctrain.errors import ConfigError
from hpctrain.models.gpt import GPT
from hpctrain.tasks.task import Sums, Task
from hpctrain.tasks.token_files import ABOUT, TokenWindows, about, find_token_files


class Tokens(Task):
    """Predict the next token of memory-mapped token files (`hpctrain.tasks.token_files` describes the format).

    A sample is a window: context_length tokens, and as targets the same shifted by one, both int64. Windows don't
    overlap, and each costs the same to reach.

    Args:
        data: the folder of the token files.
        train: name, or pattern with * and ?, of its training files.
        eval: the same for the held-out ones; None for no evaluation.
        dtype: of the numbers in ``.bin`` files, `uint16` or `uint32`; None: as in ``tokens.json``.
        context_length: tokens per window.
        vocab_size: number of the model's tokens; None: not checked.

    Raises:
        ConfigError: files are missing or too short, or have more different tokens than the model.
    """

    def __init__(
        self,
        data: str,
        train: str = "train*",
        eval: str | None = "eval*",  # noqa: A002 - named as in the configuration
        *,
        dtype: str | None = None,
        context_length: int = 1024,
        vocab_size: int | None = None,
    ) -> None:
        self._folder = Path(data)
        self._train = train
        self._eval = eval
        self._dtype = dtype
        self._context_length = context_length
        self._vocab_size = vocab_size

    def build_model(self) -> nn.Module:
        """A small GPT for these tokens.

        Raises:
            ConfigError: neither the configuration nor ``tokens.json`` has their number.
        """
        size = self._vocab_size or self._about.get("vocab_size")
        if size is None:
            problem = f"needed, since there is no {self._folder / ABOUT}"
            raise ConfigError("task.vocab_size", None, problem, "set it, or choose a model, such as model=gpt2")
        return GPT(vocab_size=size, context_length=self._context_length)

    def train_dataset(self) -> Dataset[Any]:
        """See `Task`."""
        return self._windows("task.train", self._train)

    def eval_dataset(self) -> Dataset[Any] | None:
        """See `Task`."""
        return None if self._eval is None else self._windows("task.eval", self._eval)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy per token, in nats."""
        given, targets = batch
        return F.cross_entropy(model(given).flatten(0, 1), targets.flatten())

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        """Cross-entropy per token, in nats."""
        given, targets = batch
        total = F.cross_entropy(model(given).flatten(0, 1), targets.flatten(), reduction="sum")
        return {"loss": (total, targets.numel())}

    def derive(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Perplexity: the exponential of the mean loss per token."""
        loss = means["loss"]
        # exp overflows above 709; NaN stays NaN
        return {"perplexity": math.exp(loss) if loss < 700 else loss * math.inf}

    @cached_property
    def _about(self) -> dict[str, Any]:
        found = about(self._folder)
        known = found.get("vocab_size")
        if known is not None and self._vocab_size is not None and known > self._vocab_size:
            problem = f"the files in {self._folder} have {known} different tokens"
            raise ConfigError("model.vocab_size", self._vocab_size, problem, f"set model.vocab_size={known}")
        return found

    def _windows(self, key: str, pattern: str) -> TokenWindows:
        dtype = self._dtype or self._about.get("dtype")
        files = find_token_files(key, self._folder, pattern, dtype)
        return TokenWindows(files, self._context_length, self._vocab_size)

"""Text as tokens, from files of any size."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its usual name
from torch.utils.data import Dataset

from hpctrain.errors import ConfigError
from hpctrain.models.gpt import GPT
from hpctrain.tasks.task import Sums, Task
from hpctrain.tasks.token_files import IGNORED, INFO_FILE, PackedTokens, TokenWindows, find_token_files, read_info
from hpctrain.tasks.tokeniser import tokeniser

log = logging.getLogger("hpctrain.tasks")

Batch: TypeAlias = tuple[Tensor, ...]
"""Tokens and targets; of packed sequences also documents. All are int64 of shape [n, context_length]."""


@dataclass(eq=False)
class Tokens(Task):
    """Predict the next token of memory-mapped token files (`hpctrain.tasks.token_files` describes the format).

    A sample is a window: context_length tokens, and as targets the same shifted by one, both int64. Windows don't
    overlap, and each costs the same to reach. If `packed`, a sample is a sequence of whole documents (`PackedTokens`),
    and the model is called with the tokens and the document of each, as `GPT` is.

    Args:
        data: the folder of the token files.
        train: name, or pattern with * and ?, of its training files.
        eval: the same for the held-out ones; None for no evaluation.
        dtype: of the numbers in ``.bin`` files, `uint16` or `uint32`; None: as in ``tokens.json``.
        context_length: tokens per window.
        vocab_size: number of the model's tokens; None: not checked.
        packed: whether samples are whole documents, which don't see each other.
        end_of_text: the token that ends a document; None: as in ``tokens.json``.

    Raises:
        ConfigError: files are missing or too short, or have more different tokens than the model.
    """

    data: str
    train: str = "train*"
    eval: str | None = "eval*"
    _: KW_ONLY
    dtype: str | None = None
    context_length: int = 1024
    vocab_size: int | None = None
    packed: bool = False
    end_of_text: int | None = None
    _mean_targets: float = field(default=math.nan, init=False)

    def build_model(self) -> nn.Module:
        """A small GPT for these tokens.

        Raises:
            ConfigError: neither the configuration nor ``tokens.json`` has their number.
        """
        size = self.vocab_size or self._info.get("vocab_size")
        if size is None:
            problem = f"needed, since there is no {Path(self.data) / INFO_FILE}"
            raise ConfigError("task.vocab_size", None, problem, "set it, or choose a model, such as model=gpt2")
        return GPT(vocab_size=size, context_length=self.context_length)

    def train_dataset(self) -> Dataset[Any]:
        """See `Task`."""
        dataset = self._dataset("task.train", self.train)
        if isinstance(dataset, PackedTokens):
            self._mean_targets = dataset.mean_targets
        return dataset

    def eval_dataset(self) -> Dataset[Any] | None:
        """See `Task`."""
        return None if self.eval is None else self._dataset("task.eval", self.eval)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy per token, in nats.

        Of packed sequences it is the sum, divided by the mean number of targets of all sequences: the gradient of a
        step then doesn't depend on how its sequences are shared among ranks and micro-batches.
        """
        inputs, targets, *documents = batch
        logits = model(inputs, *documents).flatten(0, 1)
        if not documents:
            return F.cross_entropy(logits, targets.flatten())
        return F.cross_entropy(logits, targets.flatten(), reduction="sum") / (len(inputs) * self._mean_targets)

    def evaluate(self, model: nn.Module, batch: Batch) -> Sums:
        """Cross-entropy per token, in nats."""
        inputs, targets, *documents = batch
        total = F.cross_entropy(model(inputs, *documents).flatten(0, 1), targets.flatten(), reduction="sum")
        return {"loss": (total, (targets != IGNORED).sum() if documents else targets.numel())}

    def derive(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Perplexity: the exponential of the mean loss per token."""
        loss = means["loss"]
        # exp overflows above 709; NaN stays NaN
        return {"perplexity": math.exp(loss) if loss < 700 else loss * math.inf}

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, by the tokeniser in ``tokens.json``; their numbers without one on this machine."""
        return self._decoder(tokens)

    @cached_property
    def _decoder(self) -> Callable[[Sequence[int]], str]:
        try:
            return tokeniser(str(self._info.get("tokenizer")), end_of_text=None).decode
        except Exception as error:  # text to look at is no reason to end a training
            log.warning("tokens are shown as numbers: %s", error)
            return lambda tokens: " ".join(map(str, tokens))

    @cached_property
    def _info(self) -> dict[str, Any]:
        record = read_info(Path(self.data))
        vocab_size = record.get("vocab_size")
        if vocab_size is not None and self.vocab_size is not None and vocab_size > self.vocab_size:
            problem = f"the files in {Path(self.data)} have {vocab_size} different tokens"
            raise ConfigError("model.vocab_size", self.vocab_size, problem, f"set model.vocab_size={vocab_size}")
        return record

    def _dataset(self, key: str, pattern: str) -> TokenWindows | PackedTokens:
        dtype = self.dtype or self._info.get("dtype")
        files = find_token_files(key, Path(self.data), pattern, dtype)
        if not self.packed:
            return TokenWindows(files, self.context_length, self.vocab_size)
        end = self._info.get("end_of_text") if self.end_of_text is None else self.end_of_text
        return PackedTokens(files, self.context_length, end_of_text=end, vocab_size=self.vocab_size)

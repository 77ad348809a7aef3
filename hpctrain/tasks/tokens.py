"""Text as tokens, from files of any size: windows of them, or whole documents, as many as fit in one sequence."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its usual name
from torch.utils.data import Dataset

from hpctrain.data.keyed_random import IntArray
from hpctrain.errors import ConfigError
from hpctrain.models.gpt import GPT
from hpctrain.phrases import counted
from hpctrain.tasks.task import Sums, Task
from hpctrain.tasks.token_files import ABOUT, IGNORED, PackedTokens, TokenWindows, about, find_token_files, ENDS, TokenFile, check_vocabulary
from hpctrain.tasks.tokeniser import decoder

log = logging.getLogger("hpctrain.tasks")

Batch: TypeAlias = tuple[Tensor, ...]
"""Tokens and targets; of packed sequences also documents. All are int64 of shape [n, context_length]."""


IGNORED = -100
"""The target where there is none; PyTorch's cross-entropy ignores it."""

_SCANNED_TOKENS = 1 << 24


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

    def __init__(
        self,
        data: str,
        train: str = "train*",
        eval: str | None = "eval*",  # noqa: A002 - named as in the configuration
        *,
        dtype: str | None = None,
        context_length: int = 1024,
        vocab_size: int | None = None,
        packed: bool = False,
        end_of_text: int | None = None,
    ) -> None:
        self._folder = Path(data)
        self._train = train
        self._eval = eval
        self._dtype = dtype
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._packed = packed
        self._end_of_text = end_of_text
        self._mean_targets = math.nan

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
        dataset = self._dataset("task.train", self._train)
        if isinstance(dataset, PackedTokens):
            self._mean_targets = dataset.mean_targets
        return dataset

    def eval_dataset(self) -> Dataset[Any] | None:
        """See `Task`."""
        return None if self._eval is None else self._dataset("task.eval", self._eval)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy per token, in nats.

        Of packed sequences it is the sum, divided by the mean number of targets of all sequences: the gradient of a
        step then doesn't depend on how its sequences are shared among ranks and micro-batches.
        """
        given, targets, *documents = batch
        logits = model(given, *documents).flatten(0, 1)
        if not documents:
            return F.cross_entropy(logits, targets.flatten())
        return F.cross_entropy(logits, targets.flatten(), reduction="sum") / (len(given) * self._mean_targets)

    def evaluate(self, model: nn.Module, batch: Batch) -> Sums:
        """Cross-entropy per token, in nats."""
        given, targets, *documents = batch
        total = F.cross_entropy(model(given, *documents).flatten(0, 1), targets.flatten(), reduction="sum")
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
            return decoder(str(self._about.get("tokenizer")))
        except Exception as error:  # text to look at is no reason to end a training
            log.warning("tokens are shown as numbers: %s", error)
            return lambda tokens: " ".join(map(str, tokens))

    @cached_property
    def _about(self) -> dict[str, Any]:
        found = about(self._folder)
        known = found.get("vocab_size")
        if known is not None and self._vocab_size is not None and known > self._vocab_size:
            problem = f"the files in {self._folder} have {known} different tokens"
            raise ConfigError("model.vocab_size", self._vocab_size, problem, f"set model.vocab_size={known}")
        return found

    def _dataset(self, key: str, pattern: str) -> TokenWindows | PackedTokens:
        dtype = self._dtype or self._about.get("dtype")
        files = find_token_files(key, self._folder, pattern, dtype)
        if not self._packed:
            return TokenWindows(files, self._context_length, self._vocab_size)
        end = self._about.get("end_of_text") if self._end_of_text is None else self._end_of_text
        return PackedTokens(files, self._context_length, end_of_text=end, vocab_size=self._vocab_size)


def document_ends(file: TokenFile, end_of_text: int | None) -> IntArray:
    """Find where documents end: from the file of their ends, or by the token that ends them.

    Args:
        file: of tokens.
        end_of_text: the token; None: unknown.

    Returns:
        int64, increasing: the number of tokens up to the end of each document; the last is the length of the file.

    Raises:
        ConfigError: the ends are unknown, or aren't those of this file.
    """
    path = ends_path(file.path)
    if path.exists():
        ends = np.fromfile(path, "<i8").astype(np.int64, copy=False)
        inside = len(ends) and ends[0] > 0 and ends[-1] <= file.length and (np.diff(ends) > 0).all()
        if not inside:
            problem = f"{path} doesn't belong to the {file.length} tokens of {file.path.name}"
            raise ConfigError("task.packed", "true", problem, "remove it, or make the token files again")
    elif end_of_text is None:
        problem = f"it is unknown where the documents of {file.path} end"
        raise ConfigError("task.end_of_text", None, problem, "set it to the token that ends a document")
    else:
        tokens = file.open()
        starts = range(0, file.length, _SCANNED_TOKENS)
        found = [begin + 1 + np.flatnonzero(tokens[begin : begin + _SCANNED_TOKENS] == end_of_text) for begin in starts]
        ends = np.concatenate(found)
    if not len(ends) or ends[-1] != file.length:
        ends = np.append(ends, file.length)
    return ends


def ends_path(path: Path) -> Path:
    """The file with the ends of the documents of a token file: little-endian int64."""
    return path.with_name(path.name + ENDS)


def sequence_bounds(ends: IntArray, length: int) -> IntArray:
    """Pack documents in their order, each sequence with as many as fit; a longer document is cut into pieces.

    Args:
        ends: from `document_ends`.
        length: most tokens of a sequence.

    Returns:
        int64, increasing, of shape [num_sequences + 1]: the first token of each sequence, then the number of tokens.
    """
    begins = np.concatenate(([0], ends[:-1]))
    pieces = -(-(ends - begins) // length)
    if (pieces > 1).any():
        number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        begins = np.repeat(begins, pieces) + number * length
    bounds = np.append(begins, ends[-1])
    following = (np.searchsorted(bounds, bounds[:-1] + length, side="right") - 1).tolist()
    chosen, place = [0], 0
    while place < len(following):
        place = following[place]
        chosen.append(place)
    return bounds[chosen]


class PackedTokens(Dataset[Any]):
    """Sequences of whole documents, with the document of each token.

    Sequence i of a file is a range of it: consecutive documents, as many as fit into `length` tokens; a longer document
    is cut. The rest of a sequence is padding, a document of its own. The target of a token is the next token of its
    document, also where the document is cut, and `IGNORED` at its end and in the padding. So each token of a document
    but its first is a target exactly once.

    Args:
        files: in their order.
        length: tokens per sequence.
        end_of_text: the token that ends a document, where a file has no file of ends.
        vocab_size: every token must be below it; None: not checked.

    Attributes:
        mean_targets: targets per sequence, on average over all of them.

    Raises:
        ConfigError: from `document_ends`; or there is no target.
    """

    def __init__(
        self, files: Sequence[TokenFile], length: int, *, end_of_text: int | None, vocab_size: int | None = None
    ) -> None:
        self._files = tuple(file for file in files if file.length)
        self._length = length
        self._vocab_size = vocab_size
        self._maps: dict[int, npt.NDArray[Any]] = {}
        self._document_ends = [document_ends(file, end_of_text) for file in self._files]
        self._bounds = [sequence_bounds(ends, length) for ends in self._document_ends]
        self._ends = np.array(list(accumulate(len(bounds) - 1 for bounds in self._bounds)))
        tokens, documents = sum(file.length for file in self._files), sum(map(len, self._document_ends))
        if tokens == documents:
            problem = f"no document of {files[0].path} has two tokens"
            raise ConfigError("task.end_of_text", end_of_text, problem, "set it to the token that ends a document")
        self.mean_targets = (tokens - documents) / len(self)
        filled = tokens / (len(self) * length)
        log.info(
            "%s packed into %s of %d tokens, %.0f%% filled: %s",
            counted(documents, "document"),
            counted(len(self), "sequence"),
            length,
            100 * filled,
            ", ".join(file.path.name for file in files),
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}  # a memory-mapped array would be pickled with all its tokens

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        given, targets, documents = self.get_batch(torch.tensor([index]))
        return given[0], targets[0], documents[0]

    def get_batch(self, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `BatchDataset`: tokens, targets and documents, three int64 tensors [n, length].

        Documents are numbered from 0 in each sequence; padding has the number after the last.

        Raises:
            TaskError: a token isn't below `vocab_size`.
        """
        numbers = indices.numpy()
        given = np.zeros((len(numbers), self._length), np.int64)
        targets = np.full_like(given, IGNORED)
        documents = np.empty_like(given)
        owners = np.searchsorted(self._ends, numbers, side="right")
        for row, (number, owner) in enumerate(zip(numbers.tolist(), owners.tolist(), strict=True)):
            place = number - (int(self._ends[owner - 1]) if owner else 0)
            begin, end = self._bounds[owner][place : place + 2].tolist()
            ends = self._document_ends[owner]
            first, last = np.searchsorted(ends, (begin, end), side="right").tolist()
            tokens = self._tokens(owner)[begin : end + 1].astype(np.int64)
            size = end - begin
            given[row, :size] = tokens[:size]
            targets[row, : len(tokens) - 1] = tokens[1:]
            # those of the documents that end in this sequence
            inner = ends[first:last] - begin
            targets[row, inner - 1] = IGNORED
            documents[row] = np.searchsorted(inner, np.arange(self._length), side="right")
            documents[row, size:] = documents[row, size - 1] + 1
        check_vocabulary(self._vocab_size, given, [self._files[owner] for owner in owners])
        return torch.from_numpy(given), torch.from_numpy(targets), torch.from_numpy(documents)

    def _tokens(self, owner: int) -> npt.NDArray[Any]:
        if owner not in self._maps:
            self._maps[owner] = self._files[owner].open()
        return self._maps[owner]

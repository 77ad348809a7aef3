"""Token files: a sequence of numbers on disk, read at random places without loading it.

A ``.bin`` file is nothing but numbers, little-endian uint16 or uint32; a ``.npy`` file is NumPy's, of shape [length]
and one of these types. ``tokens.json`` beside them says what the numbers are; `hpctrain.tasks.make_tokens` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpctrain.errors import ConfigError, TaskError
from hpctrain.files import read_json
from hpctrain.phrases import listed

DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
ABOUT = "tokens.json"
"""Describes the token files of a folder: ``vocab_size``, ``dtype`` and how they were made."""


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A file of tokens.

    Attributes:
        path: of the file.
        dtype: of its numbers.
        length: tokens in it.
        offset: bytes before the first.
    """

    path: Path
    dtype: np.dtype[Any]
    length: int
    offset: int = 0

    @classmethod
    def of(cls, path: Path, dtype: str | None) -> TokenFile:
        """Look at a file; its tokens are not read.

        Args:
            path: ``.bin`` or ``.npy``.
            dtype: of a ``.bin``: `uint16` or `uint32`.

        Raises:
            ConfigError: the file isn't one of those, or its numbers' type isn't known.
        """
        if path.suffix == ".npy":
            array = np.load(path, mmap_mode="r")
            if array.ndim != 1 or array.dtype not in DTYPES.values():
                problem = f"{path} holds {array.dtype} of shape {list(array.shape)}"
                raise ConfigError("task.data", path.parent, problem, "save uint16 or uint32 of one dimension")
            return cls(path, array.dtype, len(array), int(array.offset))
        if dtype is None:
            problem = f"nothing says whether {path} holds uint16 or uint32"
            raise ConfigError("task.dtype", None, problem, f"set task.dtype=uint16, or put it into {ABOUT} beside it")
        length, rest = divmod(path.stat().st_size, DTYPES[dtype].itemsize)
        if rest:
            problem = f"{path} has {path.stat().st_size} bytes, which is no whole number of tokens"
            raise ConfigError("task.dtype", dtype, problem, "see its type, and whether it was copied whole")
        return cls(path, DTYPES[dtype], length)

    def open(self) -> npt.NDArray[Any]:
        """Its tokens, mapped: pages are read when they are looked at."""
        mapped = np.memmap(self.path, self.dtype, mode="r", offset=self.offset, shape=(self.length,))
        return np.asarray(mapped)  # slices of it are plain arrays, which are made faster


def about(folder: Path) -> dict[str, Any]:
    """What ``tokens.json`` says; nothing where there is none."""
    try:
        return read_json(folder / ABOUT)
    except FileNotFoundError:
        return {}


def find_token_files(key: str, folder: Path, pattern: str, dtype: str | None) -> list[TokenFile]:
    """The files whose names match, sorted.

    Raises:
        ConfigError: there is none; ``key`` is what it is blamed on.
    """
    if not folder.is_dir():
        raise ConfigError("task.data", folder, "is no folder", "name the folder that holds the token files")
    paths = sorted(path for path in folder.glob(pattern) if path.suffix in (".bin", ".npy"))
    if not paths:
        others = listed(sorted(path.name for path in folder.iterdir())) or "nothing"
        problem = f"no .bin or .npy file of that name is in {folder}, which holds {others}"
        raise ConfigError(key, pattern, problem, "make it with python -m hpctrain.tasks.make_tokens, or see its name")
    return [TokenFile.of(path, dtype) for path in paths]


class TokenWindows(Dataset[Any]):
    """Windows of token files, each with the same window one token later as its targets.

    Window i of a file has the context_length tokens from i * context_length on, and as targets the one after each; what
    remains at a file's end is left out. Several files follow each other, without windows across their borders.

    Args:
        files: in their order.
        context_length: tokens per window.
        vocab_size: tokens must be below; None: not checked.

    Raises:
        ConfigError: no window fits.
    """

    def __init__(self, files: Sequence[TokenFile], context_length: int, vocab_size: int | None = None) -> None:
        self._files, self._context_length, self._vocab_size = tuple(files), context_length, vocab_size
        counts = [max(0, file.length - 1) // context_length for file in files]
        self._ends = np.array(list(accumulate(counts)))
        self._maps: dict[int, npt.NDArray[Any]] = {}
        if not self._ends[-1]:
            longest = max(file.length for file in files)
            problem = f"no window of that length fits into {files[0].path} and its like: the longest has {longest}"
            raise ConfigError("task.context_length", context_length, problem, "set a shorter one")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}  # a mapping would be pickled with all its tokens

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        given, targets = self.get_batch(torch.tensor([index]))
        return given[0], targets[0]

    def get_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """See `BatchDataset`: two int64 tensors [n, context_length].

        Raises:
            TaskError: a token that the model doesn't know.
        """
        numbers = indices.numpy()
        rows = np.empty((len(numbers), self._context_length + 1), np.int64)
        owners = np.searchsorted(self._ends, numbers, side="right")
        for row, number, owner in zip(rows, numbers.tolist(), owners.tolist(), strict=True):
            begin = (number - (int(self._ends[owner - 1]) if owner else 0)) * self._context_length
            row[:] = self._tokens(owner)[begin : begin + len(row)]
        if self._vocab_size is not None and rows.max() >= self._vocab_size:
            # on a GPU it would be an assertion in a kernel, which names nothing
            worst = int(rows.max(axis=1).argmax())
            raise TaskError(
                f"{self._files[owners[worst]].path} holds the token {rows[worst].max()}, but the model knows "
                f"{self._vocab_size} tokens: see task.dtype, or set model.vocab_size to that of the tokens"
            )
        batch = torch.from_numpy(rows)
        return batch[:, :-1], batch[:, 1:]

    def _tokens(self, owner: int) -> npt.NDArray[Any]:
        if owner not in self._maps:
            self._maps[owner] = self._files[owner].open()
        return self._maps[owner]

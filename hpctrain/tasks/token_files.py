"""Token files: sequences of numbers on disk, read at random positions without loading the file.

A ``.bin`` file holds numbers and nothing else, little-endian uint16 or uint32; a ``.npy`` file is NumPy's, of shape
[length] and one of these types. ``tokens.json`` in the same folder describes them, and ``NAME.bin.ends`` has the ends
of the documents of a file, as little-endian int64; `hpctrain.tasks.make_tokens` writes both.
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
"""The file that describes a folder's token files: ``vocab_size``, ``dtype`` and their origin."""
ENDS = ".ends"
"""Follows the name of a token file in that of the file with the ends of its documents."""


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
        """Inspect a file without reading its tokens.

        Args:
            path: ``.bin`` or ``.npy``.
            dtype: of a ``.bin``: `uint16` or `uint32`.

        Raises:
            ConfigError: the file has another suffix, or the type of its numbers is unknown.
        """
        if path.suffix == ".npy":
            array = np.load(path, mmap_mode="r")
            if array.ndim != 1 or array.dtype not in DTYPES.values():
                problem = f"{path} holds {array.dtype} of shape {list(array.shape)}"
                raise ConfigError("task.data", path.parent, problem, "save a one-dimensional array of uint16 or uint32")
            return cls(path, array.dtype, len(array), int(array.offset))
        if dtype is None:
            problem = f"it is unknown whether {path} holds uint16 or uint32"
            raise ConfigError("task.dtype", None, problem, f"set task.dtype=uint16, or add it to {ABOUT} in its folder")
        length, rest = divmod(path.stat().st_size, DTYPES[dtype].itemsize)
        if rest:
            problem = f"the {path.stat().st_size} bytes of {path} are not a whole number of tokens"
            raise ConfigError("task.dtype", dtype, problem, "check the type, and whether the file is complete")
        return cls(path, DTYPES[dtype], length)

    def open(self) -> npt.NDArray[Any]:
        """The tokens, memory-mapped."""
        mapped = np.memmap(self.path, self.dtype, mode="r", offset=self.offset, shape=(self.length,))
        return np.asarray(mapped)  # its slices are plain arrays, which are faster to make than memmaps


def about(folder: Path) -> dict[str, Any]:
    """The contents of ``tokens.json``; empty if there is none."""
    try:
        return read_json(folder / ABOUT)
    except FileNotFoundError:
        return {}


def find_token_files(key: str, folder: Path, pattern: str, dtype: str | None) -> list[TokenFile]:
    """Find the token files of a folder whose names match, sorted.

    Args:
        key: the configuration key of the pattern, for the error.
        folder: the folder of the files.
        pattern: name, or pattern with * and ?.
        dtype: of ``.bin`` files.

    Raises:
        ConfigError: no file matches.
    """
    if not folder.is_dir():
        raise ConfigError("task.data", folder, "is not a folder", "name the folder that holds the token files")
    paths = sorted(path for path in folder.glob(pattern) if path.suffix in (".bin", ".npy"))
    if not paths:
        others = listed(sorted(path.name for path in folder.iterdir())) or "nothing"
        problem = f"no .bin or .npy file of that name in {folder}, which holds {others}"
        raise ConfigError(key, pattern, problem, "make it with python -m hpctrain.tasks.make_tokens, or fix the name")
    return [TokenFile.of(path, dtype) for path in paths]


def check_vocabulary(vocab_size: int | None, rows: npt.NDArray[np.int64], files: Sequence[TokenFile]) -> None:
    """Check that a model has the tokens of a batch.

    Args:
        vocab_size: of the model; None: unknown.
        rows: tokens, of shape [n, length].
        files: from which each row comes.

    Raises:
        TaskError: a token isn't below `vocab_size`.
    """
    if vocab_size is not None and rows.max() >= vocab_size:
        # on a GPU, it would fail as an assertion in a kernel, without the name of the file
        worst = int(rows.max(axis=1).argmax())
        raise TaskError(
            f"{files[worst].path} holds the token {rows[worst].max()}, but the model has {vocab_size} tokens: check "
            "task.dtype, or set model.vocab_size to that of the tokens"
        )


class TokenWindows(Dataset[Any]):
    """Windows of token files, each with the same window one token later as its targets.

    Window i of a file has the context_length tokens from i * context_length on, and as targets the token after each;
    the remainder at the end of a file is left out. Files follow each other, without windows across their boundaries.

    Args:
        files: in their order.
        context_length: tokens per window.
        vocab_size: every token must be below it; None: not checked.

    Raises:
        ConfigError: no window fits.
    """

    def __init__(self, files: Sequence[TokenFile], context_length: int, vocab_size: int | None = None) -> None:
        self._files = tuple(files)
        self._context_length = context_length
        self._vocab_size = vocab_size
        counts = [max(0, file.length - 1) // context_length for file in files]
        self._ends = np.array(list(accumulate(counts)))
        self._maps: dict[int, npt.NDArray[Any]] = {}
        if not self._ends[-1]:
            longest = max(file.length for file in files)
            problem = (
                f"no window of that length fits into the files in {files[0].path.parent}: the longest has {longest}"
            )
            raise ConfigError("task.context_length", context_length, problem, "set a smaller one")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}  # a memory-mapped array would be pickled with all its tokens

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        given, targets = self.get_batch(torch.tensor([index]))
        return given[0], targets[0]

    def get_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """See `BatchDataset`: two int64 tensors [n, context_length].

        Raises:
            TaskError: a token isn't below `vocab_size`.
        """
        numbers = indices.numpy()
        rows = np.empty((len(numbers), self._context_length + 1), np.int64)
        owners = np.searchsorted(self._ends, numbers, side="right")
        for row, number, owner in zip(rows, numbers.tolist(), owners.tolist(), strict=True):
            begin = (number - (int(self._ends[owner - 1]) if owner else 0)) * self._context_length
            row[:] = self._tokens(owner)[begin : begin + len(row)]
        check_vocabulary(self._vocab_size, rows, [self._files[owner] for owner in owners])
        batch = torch.from_numpy(rows)
        return batch[:, :-1], batch[:, 1:]

    def _tokens(self, owner: int) -> npt.NDArray[Any]:
        if owner not in self._maps:
            self._maps[owner] = self._files[owner].open()
        return self._maps[owner]

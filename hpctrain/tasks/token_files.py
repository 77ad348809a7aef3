"""Token files: sequences of numbers on disk, read at random positions, as windows or as whole documents.

A ``.bin`` file holds numbers and nothing else, little-endian uint16 or uint32; a ``.npy`` file is NumPy's, of shape
[length] and one of these types. ``tokens.json`` in the same folder describes them, and ``NAME.bin.ends`` has the ends
of the documents of a file, as little-endian int64; `hpctrain.tasks.make_tokens` writes both.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpctrain.data.keyed_random import IntArray
from hpctrain.errors import ConfigError, TaskError
from hpctrain.files import read_json
from hpctrain.phrases import counted, listed

DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
INFO_FILE = "tokens.json"
"""The file that describes a folder's token files: ``vocab_size``, ``dtype`` and their origin."""
ENDS_SUFFIX = ".ends"
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
            raise ConfigError(
                "task.dtype", None, problem, f"set task.dtype=uint16, or add it to {INFO_FILE} in its folder"
            )
        length, remainder = divmod(path.stat().st_size, DTYPES[dtype].itemsize)
        if remainder:
            problem = f"the {path.stat().st_size} bytes of {path} are not a whole number of tokens"
            raise ConfigError("task.dtype", dtype, problem, "check the type, and whether the file is complete")
        return cls(path, DTYPES[dtype], length)

    def open(self) -> npt.NDArray[Any]:
        """The tokens, memory-mapped."""
        mapped = np.memmap(self.path, self.dtype, mode="r", offset=self.offset, shape=(self.length,))
        return np.asarray(mapped)  # its slices are plain arrays, which are faster to make than memmaps


def read_info(folder: Path) -> dict[str, Any]:
    """The contents of ``tokens.json``; empty if there is none."""
    try:
        return read_json(folder / INFO_FILE)
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
        contents = listed(sorted(path.name for path in folder.iterdir())) or "nothing"
        problem = f"no .bin or .npy file of that name in {folder}, which holds {contents}"
        raise ConfigError(key, pattern, problem, "make it with python -m hpctrain.tasks.make_tokens, or fix the name")
    return [TokenFile.of(path, dtype) for path in paths]


class _TokenSamples(Dataset[Any]):
    """The samples of several token files, which follow each other.

    Args:
        files: in their order.
        counts: samples in each file.
        vocab_size: every token must be below it; None: not checked.
    """

    def __init__(self, files: Sequence[TokenFile], counts: Sequence[int], vocab_size: int | None) -> None:
        self._files = tuple(files)
        self._vocab_size = vocab_size
        self._ends = np.cumsum(counts)
        self._maps: dict[int, npt.NDArray[Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}  # a memory-mapped array would be pickled with all its tokens

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(field[0] for field in self.get_batch(torch.tensor([index])))

    def get_batch(self, indices: Tensor) -> tuple[Tensor, ...]:
        """See `BatchDataset`."""
        raise NotImplementedError

    def _places(self, indices: Tensor) -> list[tuple[int, int]]:
        """The number of the file of each sample, and the number of the sample in that file."""
        numbers = indices.numpy()
        owners = np.searchsorted(self._ends, numbers, side="right")
        begins = np.concatenate(([0], self._ends))[owners]
        return list(zip(owners.tolist(), (numbers - begins).tolist(), strict=True))

    def _tokens(self, owner: int) -> npt.NDArray[Any]:
        if owner not in self._maps:
            self._maps[owner] = self._files[owner].open()
        return self._maps[owner]

    def _check(self, rows: npt.NDArray[np.int64], places: Sequence[tuple[int, int]]) -> None:
        """Check that the model has the tokens of a batch.

        Args:
            rows: tokens, of shape [n, length].
            places: of the samples.

        Raises:
            TaskError: a token isn't below `vocab_size`.
        """
        if self._vocab_size is not None and rows.max() >= self._vocab_size:
            # on a GPU, it would fail as an assertion in a kernel, without the name of the file
            worst = int(rows.max(axis=1).argmax())
            raise TaskError(
                f"{self._files[places[worst][0]].path} holds the token {rows[worst].max()}, but the model has "
                f"{self._vocab_size} tokens: check task.dtype, or set model.vocab_size to that of the tokens"
            )


class TokenWindows(_TokenSamples):
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
        super().__init__(files, [max(0, file.length - 1) // context_length for file in files], vocab_size)
        self._context_length = context_length
        if not self._ends[-1]:
            longest = max(file.length for file in files)
            problem = (
                f"no window of that length fits into the files in {files[0].path.parent}: the longest has {longest}"
            )
            raise ConfigError("task.context_length", context_length, problem, "set a smaller one")

    def get_batch(self, indices: Tensor) -> tuple[Tensor, ...]:
        """See `BatchDataset`: two int64 tensors [n, context_length].

        Raises:
            TaskError: a token isn't below `vocab_size`.
        """
        places = self._places(indices)
        rows = np.empty((len(places), self._context_length + 1), np.int64)
        for row, (owner, place) in zip(rows, places, strict=True):
            begin = place * self._context_length
            row[:] = self._tokens(owner)[begin : begin + len(row)]
        self._check(rows, places)
        batch = torch.from_numpy(rows)
        return batch[:, :-1], batch[:, 1:]


log = logging.getLogger("hpctrain.tasks")

IGNORED = -100
"""The target where there is none; PyTorch's cross-entropy ignores it."""

_SCANNED_TOKENS = 1 << 24


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
        ends_by_chunk = [
            begin + 1 + np.flatnonzero(tokens[begin : begin + _SCANNED_TOKENS] == end_of_text) for begin in starts
        ]
        ends = np.concatenate(ends_by_chunk)
    if not len(ends) or ends[-1] != file.length:
        ends = np.append(ends, file.length)
    return ends


def ends_path(path: Path) -> Path:
    """The file with the ends of the documents of a token file: little-endian int64."""
    return path.with_name(path.name + ENDS_SUFFIX)


def sequence_bounds(ends: IntArray, length: int) -> IntArray:
    """Pack documents in their order, each sequence with as many as fit; a longer document is cut into pieces.

    Best-fit packing would fill sequences better, but need a table of documents, and move them far apart.

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


class PackedTokens(_TokenSamples):
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
        filled_files = [file for file in files if file.length]
        self._length = length
        self._document_ends = [document_ends(file, end_of_text) for file in filled_files]
        self._bounds = [sequence_bounds(ends, length) for ends in self._document_ends]
        super().__init__(filled_files, [len(bounds) - 1 for bounds in self._bounds], vocab_size)
        tokens, documents = sum(file.length for file in filled_files), sum(map(len, self._document_ends))
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

    def get_batch(self, indices: Tensor) -> tuple[Tensor, ...]:
        """See `BatchDataset`: tokens, targets and documents, three int64 tensors [n, length].

        Documents are numbered from 0 in each sequence; padding has the number after the last.

        Raises:
            TaskError: a token isn't below `vocab_size`.
        """
        places = self._places(indices)
        inputs = np.zeros((len(places), self._length), np.int64)
        targets = np.full_like(inputs, IGNORED)
        documents = np.empty_like(inputs)
        for row, (owner, place) in enumerate(places):
            begin, end = self._bounds[owner][place : place + 2].tolist()
            ends = self._document_ends[owner]
            first, last = np.searchsorted(ends, (begin, end), side="right").tolist()
            tokens = self._tokens(owner)[begin : end + 1].astype(np.int64)
            size = end - begin
            inputs[row, :size] = tokens[:size]
            targets[row, : len(tokens) - 1] = tokens[1:]
            # those of the documents that end in this sequence
            inner = ends[first:last] - begin
            targets[row, inner - 1] = IGNORED
            documents[row] = np.searchsorted(inner, np.arange(self._length), side="right")
            documents[row, size:] = documents[row, size - 1] + 1
        self._check(inputs, places)
        return torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(documents)

"""The digest of a model's weights that doesn't depend on how ranks share them.

Each rank adds up its own elements, each times a number that depends on its place in the whole tensor; the sums of all
ranks are added, modulo 2^64. Any division of a tensor into boxes gives the same sums. The keys of places are those of
splitmix64 (Steele, Lea and Flood, OOPSLA 2014), made odd, one for each index of each dimension; that of an element is
their product. Two such sums make 128 bits. They find accidental differences, such as a flipped bit, exchanged rows or a
wrong update; they don't protect against somebody who looks for weights with the same sums.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hpctrain.checkpoint.sharded.chunk import Chunk

PREFIX = "sum128:"
"""Begins such a digest, so that nobody takes it for the SHA-256 of a whole checkpoint's weights."""
LANES = 2
MODULUS = 1 << 64
_BLOCK_ELEMENTS = 1 << 17
"""Elements whose products are in memory at once."""
_SHORT = 256
"""Elements of a row that are worth a loop of NumPy's."""
_WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
Array = np.ndarray[Any, np.dtype[np.uint64]]


def partial_sums(chunk: Chunk) -> tuple[int, int]:
    """Return what the elements of a chunk contribute to the two sums of its tensor.

    Args:
        chunk: of any dense dtype of 1, 2, 4, 8 or 16 bytes.
    """
    tensor = chunk.tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not tensor.numel():
        return 0, 0
    words = _as_words(tensor)
    offsets = (*chunk.region.offsets, *(0,) * (words.ndim - len(chunk.region.offsets)))
    first, second = (
        _sum(words, [_keys(lane, axis, offset, size) for axis, (offset, size) in enumerate(_boxes(offsets, words))])
        for lane in range(LANES)
    )
    return first, second


def combined(tensors: Mapping[str, tuple[tuple[int, ...], str, tuple[int, ...]]]) -> str:
    """Return the digest of a model.

    It is the SHA-256, in hexadecimal, of a line for each tensor in sorted order: name, dtype, sizes joined by commas,
    and the two sums in decimal, separated by NUL, and a newline; in UTF-8.

    Args:
        tensors: shape, dtype and sums over all chunks, by name.
    """
    digest = hashlib.sha256()
    for name, (shape, dtype, sums) in sorted(tensors.items()):
        fields = name, dtype, ",".join(map(str, shape)), *(str(each % MODULUS) for each in sums)
        digest.update(("\0".join(fields) + "\n").encode())
    return PREFIX + digest.hexdigest()


def _boxes(offsets: tuple[int, ...], words: Any) -> list[tuple[int, int]]:
    return list(zip(offsets, words.shape, strict=True))


def _as_words(tensor: torch.Tensor) -> Any:
    """View the elements as unsigned integers; those of 16 bytes as two each, in a dimension of their own."""
    size = tensor.element_size()
    shape = tuple(tensor.shape) or (1,)
    flat: np.ndarray[Any, Any] = tensor.reshape(-1).view(torch.uint8).numpy()
    if size in _WORDS:
        return flat.view(_WORDS[size]).reshape(shape)
    return flat.view(np.uint64).reshape(*shape, size // 8)


def _sum(words: Any, keys: list[Array]) -> int:
    """Add up words times the products of their keys, modulo 2^64."""
    while len(keys) > 1 and len(keys[-1]) < _SHORT:
        # as in a convolution's kernel: NumPy is slow on short rows
        keys = [*keys[:-2], np.multiply.outer(keys[-2], keys[-1]).reshape(-1)]
    rows = words.reshape(-1, len(keys[-1]))
    left = np.empty(len(rows), np.uint64)
    # in pieces, since products have eight bytes
    height, width = max(1, _BLOCK_ELEMENTS // rows.shape[1]), min(rows.shape[1], _BLOCK_ELEMENTS)
    for top in range(0, len(rows), height):
        block = slice(top, top + height)
        left[block] = sum(
            np.sum(rows[block, begin : begin + width] * keys[-1][begin : begin + width], axis=1, dtype=np.uint64)
            for begin in range(0, rows.shape[1], width)
        )
    return int(left[0]) if len(keys) == 1 else _sum(left, keys[:-1])


def _keys(lane: int, axis: int, offset: int, size: int) -> Array:
    """Return the keys of the indices from ``offset`` on."""
    with np.errstate(over="ignore"):
        seed = np.uint64((lane * 0x632BE59BD9B4E019 + axis * 0x8CB92BA72F3D8DD7) % MODULUS)
        state = seed + np.arange(offset + 1, offset + size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        found: Array = (state ^ (state >> np.uint64(31))) | np.uint64(1)
    return found

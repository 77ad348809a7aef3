"""The digest of a model's weights that doesn't depend on how ranks share them.

A SHA-256 needs all elements in order, and so in one process. A sum can be divided.
Each rank adds up its own elements, each times a number that depends on its place in the whole tensor; the sums of all
ranks are added, modulo 2^64. Any division of a tensor into boxes gives the same sums. The keys of places are those of
splitmix64 (Steele, Lea and Flood, OOPSLA 2014), made odd, one for each index of each dimension; that of an element is
their product. Two such sums make 128 bits. They find accidental differences, such as a flipped bit, exchanged rows or a
wrong update; they don't protect against an attacker who searches for weights with the same sums.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from hpctrain.checkpoint.host_memory import element_bytes
from hpctrain.checkpoint.sharded.chunk_file import Chunk

PREFIX = "sum128:"
"""Begins such a digest, to distinguish it from the SHA-256 of a whole checkpoint's weights."""
LANES = 2
MODULUS = 1 << 64
_BLOCK_ELEMENTS = 1 << 17
"""Elements whose products are in memory at once."""
_REMEMBERED = 4
"""Blocks of keys that are kept: those of a row, unless it is longer."""
_SHORT = 256
"""Elements of a row that are worth a loop of NumPy's."""
_WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_WORD_BYTES = max(_WORDS)
Array = np.ndarray[Any, np.dtype[np.uint64]]
Keys = Callable[[int, int, int], Array]


def partial_sums(chunk: Chunk) -> tuple[int, int]:
    """Return what the elements of a chunk contribute to the two sums of its tensor.

    Args:
        chunk: of any dense dtype of 1, 2, 4, 8 or 16 bytes.
    """
    if not chunk.tensor.numel():
        return 0, 0
    words = _as_words(chunk.tensor)
    offsets = (*chunk.region.offsets, *(0,) * (words.ndim - len(chunk.region.offsets)))
    # blocks of rows have the keys of their columns in common
    first, second = _sums(words, offsets, 0, lru_cache(words.ndim + _REMEMBERED)(_keys))
    return first, second


def combine_sums(tensors: Mapping[str, tuple[tuple[int, ...], str, tuple[int, ...]]]) -> str:
    """Return the digest of a model.

    It is the SHA-256, in hexadecimal, of a line for each tensor in sorted order: name, dtype, sizes joined by commas,
    and the two sums in decimal, separated by NUL, and a newline; in UTF-8.

    Args:
        tensors: shape, dtype and sums over all chunks, by name.
    """
    digest = hashlib.sha256()
    for name, (shape, dtype, sums) in sorted(tensors.items()):
        line = name, dtype, ",".join(map(str, shape)), *(str(lane_sum % MODULUS) for lane_sum in sums)
        digest.update(("\0".join(line) + "\n").encode())
    return PREFIX + digest.hexdigest()


def _as_words(tensor: torch.Tensor) -> Any:
    """View the elements as unsigned integers; those of 8 and 16 bytes as several, in a dimension of their own."""
    size = tensor.element_size()
    shape = tuple(tensor.shape) or (1,)
    flat: np.ndarray[Any, Any] = element_bytes(tensor).numpy()
    if size in _WORDS:
        return flat.view(_WORDS[size]).reshape(shape)
    # a word of eight bytes would hide its sign: 2^63 times any odd key is 2^63, and two changed signs would cancel out
    return flat.view(_WORDS[_WORD_BYTES]).reshape(*shape, size // _WORD_BYTES)


def _sums(words: Any, offsets: tuple[int, ...], axis: int, keys: Keys) -> list[int]:
    """Add up words times the products of their keys, modulo 2^64, in each lane.

    Args:
        words: with the dimensions from ``axis`` on.
        offsets: of the words, by dimension.
        axis: the first dimension.
        keys: `_keys`, which remembers some.
    """
    row = words.size // len(words)
    totals = [0] * LANES
    # in blocks, since products have eight bytes
    step = max(1, _BLOCK_ELEMENTS // row)
    for begin in range(0, len(words), step):
        block, offset = words[begin : begin + step], offsets[0] + begin
        if row > _BLOCK_ELEMENTS:
            row_keys = keys(axis, offset, 1)[:, 0].tolist()
            inner = _sums(block[0], offsets[1:], axis + 1, keys)
            sums = [key * lane_sum for key, lane_sum in zip(row_keys, inner, strict=True)]
        else:
            boxes = zip((offset, *offsets[1:]), block.shape, strict=True)
            sums = _block_sums(block, [keys(axis + number, *box) for number, box in enumerate(boxes)])
        totals = [(total + lane_sum) % MODULUS for total, lane_sum in zip(totals, sums, strict=True)]
    return totals


def _block_sums(words: Any, keys: list[Array]) -> list[int]:
    while len(keys) > 1 and keys[-1].shape[1] < _SHORT:
        # as in a convolution's kernel: NumPy is slow on short rows
        keys = [*keys[:-2], (keys[-2][:, :, None] * keys[-1][:, None, :]).reshape(LANES, -1)]
    wide = words.astype(np.uint64)
    totals = []
    for lane in range(LANES):
        products = wide
        for axis_keys in reversed(keys):
            # unlike a product and its sum, einsum keeps nothing between the two
            products = np.einsum("ij,j->i", products.reshape(-1, axis_keys.shape[1]), axis_keys[lane])
        totals.append(int(products[0]))
    return totals


def _keys(axis: int, offset: int, size: int) -> Array:
    """Return the keys of the indices from ``offset`` on, by lane."""
    lane = np.arange(LANES, dtype=np.uint64)[:, None] * np.uint64(0x632BE59BD9B4E019)
    state = np.arange(offset + 1, offset + size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = state + (lane + np.uint64(axis * 0x8CB92BA72F3D8DD7 % MODULUS))
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    state |= np.uint64(1)
    keys: Array = state
    return keys

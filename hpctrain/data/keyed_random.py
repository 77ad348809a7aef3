"""Random numbers that are a function of a key, and the global generators that a dataset draws from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from numpy.random import mtrand as np_random

IntArray: TypeAlias = npt.NDArray[np.int64]

_MASK = (1 << 64) - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

_bit_generator = np.random.MT19937()


def keyed_bits(*key: int | npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.uint64]:
    """64 bits for every key: equal keys give equal bits on every platform, different keys give unrelated ones.

    Each part of the key goes through the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
    number generators", OOPSLA 2014), chained by exclusive or.

    Args:
        key: integers and integer arrays, taken modulo 2**64; they broadcast against each other.

    Returns:
        uint64, of the parts' common shape, with at least one dimension.
    """
    bits = np.zeros(1, dtype=np.uint64)
    for part in key:
        word = np.uint64(part & _MASK) if isinstance(part, int) else part.astype(np.uint64)
        bits = _splitmix64(bits ^ word)
    return bits


def _splitmix64(word: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    word = word + _GAMMA
    word = (word ^ (word >> np.uint64(30))) * _MIX_1
    word = (word ^ (word >> np.uint64(27))) * _MIX_2
    return word ^ (word >> np.uint64(31))


@contextmanager
def lent_generators() -> Iterator[None]:
    """Let the context use the global CPU generators of `random`, NumPy and PyTorch, and restore them afterwards."""
    python, pytorch = random.getstate(), torch.default_generator.get_state()
    # swap the generators instead of copying their states: reading and writing NumPy's state takes 70 us
    numpy = np_random.get_bit_generator()
    np_random.set_bit_generator(_bit_generator)
    try:
        yield
    finally:
        random.setstate(python)
        np_random.set_bit_generator(numpy)
        torch.default_generator.set_state(pytorch)


def seed_generators(bits: int) -> None:
    """Seed the three global CPU generators from 64 bits; CUDA's generators keep their state."""
    random.seed(bits)
    np.random.seed(bits & 0xFFFFFFFF)
    torch.default_generator.manual_seed(bits)

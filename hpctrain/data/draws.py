"""The global generators of `random`, NumPy and PyTorch, lent to the samples and given back untouched."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.random import mtrand as np_random

_bit_generator = np.random.MT19937()


@contextmanager
def lent_generators() -> Iterator[None]:
    """Inside, the three global CPU generators can be seeded and drawn from; after it they go on as if nothing was."""
    python, pytorch = random.getstate(), torch.default_generator.get_state()
    numpy = np_random.get_bit_generator()  # exchanged, not copied: its state takes 70 us to read and write
    np_random.set_bit_generator(_bit_generator)
    try:
        yield
    finally:
        random.setstate(python)
        np_random.set_bit_generator(numpy)
        torch.default_generator.set_state(pytorch)


def seed_generators(bits: int) -> None:
    """Seed the three global CPU generators, and no other (CUDA's stay as they are), from 64 bits."""
    random.seed(bits)
    np.random.seed(bits & 0xFFFFFFFF)
    torch.default_generator.manual_seed(bits)

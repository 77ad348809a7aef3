"""Seeds: one for what all ranks build alike, one per rank for what they draw."""

from __future__ import annotations

import random

import torch

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: spreads consecutive ranks (SplitMix64, Steele et al. 2014)."""


def rank_seed(seed: int, rank: int) -> int:
    """The seed of one rank's generators; rank zero's is the run's own, as in a script of one process."""
    return (seed + rank * GOLDEN) % 2**63


def seed_everything(seed: int) -> None:
    """Seed `random`, NumPy where it is in use, and torch on every device."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)

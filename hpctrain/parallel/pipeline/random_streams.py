"""The random numbers of a rank in a pipeline: those of the task, which all stages share, and those of its layers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hpctrain.rank.determinism import random_states, set_random_states

SPREAD = 0xD1342543DE82EF95
"""An odd multiplier that spreads consecutive numbers (that of a generator of Steele & Vigna, 2022)."""


class RandomStreams:
    """Keeps apart what the task draws from what the layers of this rank draw.

    All stages compute the task's code up to the call of the model, on the same samples. If it draws there, for example
    which tokens to mask, all of them need the same numbers. Dropout in different layers needs different ones.

    Args:
        seed: the same on all ranks that have the same samples.
        gpus: of this rank.
    """

    def __init__(self, seed: int, gpus: Sequence[torch.device]) -> None:
        self._seed = seed
        self._gpus = list(gpus)
        self._of_layers: Any = None

    @contextmanager
    def of_task(self, number: int) -> Iterator[None]:
        """Context manager that draws from the task's stream; after it, the layers' stream continues.

        Args:
            number: of the micro-batch, in the whole run.
        """
        self._of_layers = random_states(self._gpus)
        self._begin((self._seed + (number + 1) * SPREAD) % 2**63)
        try:
            yield
        finally:
            set_random_states(self._of_layers, self._gpus)

    @contextmanager
    def of_layers(self) -> Iterator[None]:
        """Context manager, inside of `of_task`, that draws from the stream of this rank's layers."""
        of_task = random_states(self._gpus)
        set_random_states(self._of_layers, self._gpus)
        try:
            yield
        finally:
            self._of_layers = random_states(self._gpus)
            set_random_states(of_task, self._gpus)

    def _begin(self, seed: int) -> None:
        # not by torch.manual_seed, which looks for devices of all kinds
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        for gpu in self._gpus:
            torch.cuda.default_generators[gpu.index].manual_seed(seed)

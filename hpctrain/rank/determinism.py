"""Make torch reproducible to the bit: deterministic algorithms and seeds."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

DETERMINISM_VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""What a deterministic run sets unless it is set already.

cuBLAS reads its variable once, when it is initialised. NCCL reads its own when it makes a communicator: by default it
chooses algorithm and protocol by size, links and version, and each choice adds in another order.
"""
GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: spreads consecutive ranks (SplitMix64, Steele et al. 2014)."""

_searches = False
"""Whether the last call of `set_determinism` had cuDNN search for its fastest algorithms."""


def set_determinism(on: bool, environ: MutableMapping[str, str] = os.environ, *, cudnn_benchmark: bool = False) -> None:
    """Allow only deterministic algorithms, or restore torch's default; process-wide, before CUDA is initialised.

    An operation without a deterministic algorithm then raises an error that names it. Sets the `DETERMINISM_VARIABLES`
    that aren't set yet, which NCCL reads too, and never removes them.

    Args:
        on: `trainer.deterministic`.
        environ: of this process.
        cudnn_benchmark: `trainer.cudnn_benchmark`; not with ``on``.
    """
    if on:
        for name, value in DETERMINISM_VARIABLES.items():
            # a value that the user exported stays
            environ.setdefault(name, value)
    global _searches  # noqa: PLW0603 - torch's setting is the process's, too
    if on or cudnn_benchmark or _searches:  # what a task's own code sets stays
        torch.backends.cudnn.benchmark = _searches = cudnn_benchmark
    # called only if needed: it imports torch's compiler
    if on or torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(on)
        torch.backends.cudnn.deterministic = on
        # torch would fill every new tensor with NaN, which costs time and shows only reads of uninitialised memory
        torch.utils.deterministic.fill_uninitialized_memory = not on  # type: ignore[attr-defined]  # torch's module hides it


def rank_seed(seed: int, rank: int) -> int:
    """The seed of one rank's generators; rank zero's is the run's own, as in a script of one process."""
    return (seed + rank * GOLDEN) % 2**63


def seed_everything(seed: int) -> None:
    """Seed `random`, NumPy, and torch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states(gpus: Sequence[torch.device] = ()) -> Any:
    """Return the global random states of `random`, NumPy, and torch on the CPU and these GPUs."""
    cuda = [torch.cuda.get_rng_state(gpu) for gpu in gpus]
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_random_states(states: Any, gpus: Sequence[torch.device] = ()) -> None:
    """Set the global random states, as `random_states` returned them for the same GPUs."""
    of_python, of_numpy, of_torch, of_cuda = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    for gpu, state in zip(gpus, of_cuda, strict=True):
        torch.cuda.set_rng_state(state, gpu)


@contextmanager
def random_states_restored(gpus: Sequence[torch.device] = ()) -> Iterator[None]:
    """Restore the global random states after the context: of `random`, NumPy, and torch on the CPU and these GPUs."""
    states = random_states(gpus)
    try:
        yield
    finally:
        set_random_states(states, gpus)

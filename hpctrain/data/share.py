"""How many loading processes a rank has, where nobody says."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from hpctrain.data.dataset import BatchDataset

MOST_WORKERS = 8
"""More than these rarely feed a rank faster, and each takes memory."""
CPU_SHARE = 4
"""On a CPU one core in so many is left to loading: the others compute."""


def chosen_workers(dataset: Dataset[Any], cores: int, *, on_gpu: bool) -> int:
    """Loading processes for a dataset.

    None where they only cost: for data that comes a batch at a time, and for streams, which each of them would read.

    Args:
        dataset: of the task.
        cores: that are the rank's share.
        on_gpu: whether the rank computes on a GPU; one core drives it.
    """
    inner: Any = dataset
    while isinstance(inner, Subset):
        inner = inner.dataset
    in_batches = isinstance(inner, BatchDataset | TensorDataset) and not getattr(inner, "draws_per_sample", False)
    if in_batches or isinstance(inner, IterableDataset):
        return 0
    return min(MOST_WORKERS, cores - 1 if on_gpu else cores // CPU_SHARE)

"""The evaluation batches of one rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from hpctrain.data.fetch import BatchFetcher, Collate, Request
from hpctrain.data.workers import IN_PROCESS, Workers, fetch_batches
from hpctrain.errors import TaskError


class EvalLoader:
    """Every sample exactly once over all ranks, without padding: rank r has the r-th of world_size contiguous slices.

    Ranks can have different numbers of batches, even none, so evaluation runs outside DDP, without a collective per
    batch. The samples' random draws depend only on the index: every evaluation sees the same samples.

    Args:
        dataset: the held-out samples (`BatchDataset` lists the protocols); it needs a length.
        micro_batch_size: samples per batch; a rank's last one can be smaller.
        rank: the rank that evaluates the slice.
        world_size: number of slices.
        collate_fn: makes a batch of a list of samples; PyTorch's default collation if None.
        workers: how batches are fetched; worker processes are started for each pass.

    Attributes:
        most_batches: the largest number of batches of any rank.

    Raises:
        TaskError: the dataset has no length.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        micro_batch_size: int,
        *,
        rank: int,
        world_size: int,
        collate_fn: Collate | None = None,
        workers: Workers = IN_PROCESS,
    ) -> None:
        # not the run's seed: runs with different seeds should be compared on the same samples
        self._fetcher = BatchFetcher(dataset, 0, collate_fn)
        num_samples = self._fetcher.num_samples
        if num_samples is None:
            raise TaskError(f"{type(dataset).__name__} can't be evaluated: it has no __len__")
        self._micro_batch_size = micro_batch_size
        self.most_batches = math.ceil(math.ceil(num_samples / world_size) / micro_batch_size)
        self._begin, self._end = (num_samples * edge // world_size for edge in (rank, rank + 1))
        self._workers = workers

    def __len__(self) -> int:
        """Batches of this rank."""
        return math.ceil((self._end - self._begin) / self._micro_batch_size)

    def __iter__(self) -> Iterator[Any]:
        """One pass over this rank's slice, as batches."""
        workers = replace(self._workers, num_workers=min(self._workers.num_workers, len(self)))
        return fetch_batches(self._fetcher, self._requests(), workers)

    def _requests(self) -> Iterator[Request]:
        for begin in range(self._begin, self._end, self._micro_batch_size):
            yield 0, np.arange(begin, min(begin + self._micro_batch_size, self._end))

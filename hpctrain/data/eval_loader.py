"""The evaluation batches of one rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from hpctrain.data.fetch import BatchFetcher, Collate, Request
from hpctrain.data.tree import map_tensors
from hpctrain.data.workers import fetch_in_workers
from hpctrain.errors import TaskError


class EvalLoader:
    """Every sample exactly once over all ranks, without padding: rank r has the r-th of world_size contiguous slices.

    Ranks can have different numbers of batches, and a rank none at all, so evaluation runs outside DDP, without a
    collective per batch. Draws of the samples depend on (seed, index) alone: every evaluation sees the same.

    Args:
        dataset: with `__len__` and `__getitem__`; `BatchDataset` tells what else is used.
        micro_batch_size: samples per batch; a rank's last one can be smaller.
        rank: whose slice.
        world_size: number of slices.
        seed: key of the samples' random draws.
        num_workers: processes that fetch, started for each pass; with 0 the batches are fetched in this process.
        pin_memory: return tensors in page-locked memory; without CUDA it has no effect.
        collate_fn: makes a batch of a list of samples; PyTorch's default collation if None.
        prefetch_factor: batches that every worker fetches ahead.

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
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
        collate_fn: Collate | None = None,
        prefetch_factor: int = 2,
    ) -> None:
        self._fetcher = BatchFetcher(dataset, seed, collate_fn)
        if self._fetcher.num_samples is None:
            raise TaskError(f"{type(dataset).__name__} can't be evaluated: it has no __len__")
        num_samples = self._fetcher.num_samples
        self._micro_batch_size = micro_batch_size
        self._begin, self._end = (num_samples * edge // world_size for edge in (rank, rank + 1))
        self._num_workers, self._prefetch_factor = num_workers, prefetch_factor
        self._pin_memory = pin_memory and torch.cuda.is_available()

    def __len__(self) -> int:
        """Batches of this rank."""
        return math.ceil((self._end - self._begin) / self._micro_batch_size)

    def __iter__(self) -> Iterator[Any]:
        """One pass over this rank's slice, as batches."""
        workers = min(self._num_workers, len(self))
        if workers:
            return fetch_in_workers(
                self._fetcher,
                self._requests(),
                num_workers=workers,
                prefetch_factor=self._prefetch_factor,
                pin_memory=self._pin_memory,
            )
        return self._from_here()

    def _from_here(self) -> Iterator[Any]:
        for request in self._requests():
            batch = self._fetcher[request]
            yield map_tensors(torch.Tensor.pin_memory, batch) if self._pin_memory else batch

    def _requests(self) -> Iterator[Request]:
        for begin in range(self._begin, self._end, self._micro_batch_size):
            yield 0, np.arange(begin, min(begin + self._micro_batch_size, self._end))

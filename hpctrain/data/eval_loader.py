"""The evaluation batches of one rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from hpctrain.data.fetch import BatchFetcher, Collate, EpochFetcher, Request, UpToEnd
from hpctrain.data.stream import is_stream
from hpctrain.data.workers import IN_PROCESS, Workers, fetch_batches
from hpctrain.rank.agreement import LoadingStop


class EvalLoader:
    """Every sample exactly once over all ranks, without padding.

    Rank r has the r-th of world_size contiguous slices. Of an iterable dataset, whose end may not be known before it is
    reached, it has every world_size-th micro-batch, from the r-th on. With `__len__`, that many samples are evaluated.

    Ranks can have different numbers of batches, even none, so evaluation runs outside DDP, without a collective per
    batch. The samples' random draws depend only on the index: every evaluation sees the same samples.

    Args:
        dataset: the held-out samples (`BatchDataset` lists the protocols), or an iterable dataset.
        micro_batch_size: samples per batch; a rank's last one can be smaller.
        rank: the rank that evaluates the slice.
        world_size: number of slices.
        collate_fn: makes a batch of a list of samples; PyTorch's default collation if None.
        workers: how batches are fetched; worker processes are started for each pass.

    Attributes:
        num_samples: of the dataset; None for an iterable dataset without `__len__`.
        end: number of samples before the end of an iterable dataset, if this rank reached it in its last pass.
        num_taken: samples in the batch of the last round; 0 in a round in which only other ranks have one.
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
        self._dataset = dataset
        self._collate = collate_fn
        self._micro_batch_size = micro_batch_size
        self._rank = rank
        self._world_size = world_size
        self._workers = workers
        # not the run's seed: runs with different seeds should be compared on the same samples
        self._fetcher = (
            EpochFetcher(dataset, collate_fn) if is_stream(dataset) else BatchFetcher(dataset, 0, collate_fn)
        )
        self.num_samples = self._fetcher.num_samples
        self.end: int | None = None
        self.num_taken = 0
        self._loading: LoadingStop | None = None

    @property
    def is_interleaved(self) -> bool:
        """Whether the order of the dataset is by round and then by rank, and not by rank and then by round."""
        return isinstance(self._fetcher, EpochFetcher)

    @property
    def num_rounds(self) -> int | None:
        """Number of rounds of a whole pass; None for an iterable dataset without `__len__`."""
        num_samples = self.num_samples
        if num_samples is None:
            return None
        return math.ceil(math.ceil(num_samples / self._world_size) / self._micro_batch_size)

    def rounds(self, at_most: int | None = None, loading: LoadingStop | None = None) -> Generator[Any, None, None]:
        """One pass over this rank's share, with the same number of rounds on every rank.

        Yields a batch, or None in a round in which only other ranks have one.

        Args:
            at_most: number of rounds after which to end the pass; None for a whole pass.
            loading: stops the ranks while they wait for the batch of a round; None: nothing stops them.

        Raises:
            StopWhileLoading: the ranks stop.
        """
        self._loading = loading
        most = min((bound for bound in (self.num_rounds, at_most) if bound is not None), default=None)
        if isinstance(self._fetcher, EpochFetcher):
            return self._rounds_of_stream(most)
        assert most is not None
        return self._rounds(most)

    def stand_in(self) -> Any | None:
        """Return a batch of the first sample, for a rank that only joins the passes of others; None without samples."""
        first = (0, np.arange(1))
        if isinstance(self._fetcher, EpochFetcher):
            # another reader: that of the rounds must stay where it is
            return EpochFetcher(self._dataset, self._collate)[first].batch
        return self._fetcher[first] if self.num_samples else None

    def _rounds(self, most: int) -> Generator[Any, None, None]:
        size, num_samples = self._micro_batch_size, self.num_samples
        assert num_samples is not None
        begin, end = (num_samples * edge // self._world_size for edge in (self._rank, self._rank + 1))
        requests = ((0, np.arange(first, min(first + size, end))) for first in range(begin, end, size))
        own = min(most, math.ceil((end - begin) / size))
        batches = self._fetch(itertools.islice(requests, own), own)
        for round_index in range(most):
            self.num_taken = max(0, min(size, end - begin - round_index * size))
            yield next(batches, None)

    def _rounds_of_stream(self, most: int | None) -> Generator[Any, None, None]:
        size, length = self._micro_batch_size, self.num_samples
        per_round = size * self._world_size
        slices = ((first, first + size) for first in itertools.count(self._rank * size, per_round))
        # empty where the slice begins after the length
        requests = ((0, np.arange(first, last if length is None else min(last, length))) for first, last in slices)
        found: Iterator[UpToEnd] = self._fetch(itertools.islice(requests, most), most)
        self.end = None
        for round_index, (batch, end) in enumerate(found):
            if end is not None:
                self.end = end
            # without a length, all ranks read the same stream, and find the same end, perhaps in different rounds
            if length is None and end is not None and round_index * per_round >= end:
                return
            first = round_index * per_round + self._rank * size
            bounds = [first + size, *(bound for bound in (length, self.end) if bound is not None)]
            self.num_taken = max(0, min(bounds) - first)
            yield batch

    def _fetch(self, requests: Iterator[Request], most: int | None) -> Iterator[Any]:
        num_workers = self._workers.num_workers
        workers = replace(self._workers, num_workers=num_workers if most is None else min(num_workers, most))
        return fetch_batches(self._fetcher, requests, workers, self._loading)

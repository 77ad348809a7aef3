"""The batches of one rank: for training from any step on, and for evaluation."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import tee
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from torch.utils.data import Dataset

from hpctrain.data.bookmark import Bookmark, MarkedBatch
from hpctrain.data.fetch import BatchFetcher, Collate, CollatedBatch, EpochBatch, EpochFetcher, Request, fetch_batches
from hpctrain.data.keyed_random import IntArray
from hpctrain.data.micro_batch import BatchTransfer, MicroBatch, count_samples, transfer_batches
from hpctrain.data.order import Order
from hpctrain.data.plan import BatchPlan
from hpctrain.data.stream import is_stream
from hpctrain.data.workers import IN_PROCESS, Workers
from hpctrain.errors import TaskError
from hpctrain.rank.agreement import LoadingStop

_CHUNK_STEPS = 256
_CHUNK_SAMPLES = 16_384


Weigh: TypeAlias = Callable[[Any, int, int], tuple[float, int]]
"""As `LossWeights.weigh`."""


@dataclass(eq=False)
class TrainLoader:
    """An endless iterable over this rank's micro-batches, in step order, across epochs.

    It has no state: the position is the loop's step counter, and a resume is a loader with that `start_step`. Batches
    that workers have prefetched don't count. Workers live as long as the iterator: call the iterator's `close()`.

    Attributes:
        fetcher: of the training samples; its bookmarks are updated with each micro-batch.
        order: maps positions of an epoch to samples.
        plan: the batch arithmetic.
        rank: the rank that trains on the micro-batches.
        start_step: the first step, from 0, counted over the whole run.
        workers: how batches are fetched.
        weigh: returns the weight of a batch on the CPU, and the number of samples in it, from the batch, the planned
            number of samples, and the number of those that the batch holds; None: micro-batches have no weight.
        waited_s: seconds that the consumer has waited for micro-batches so far, with their transfer.
    """

    fetcher: BatchFetcher
    order: Order
    plan: BatchPlan
    _: KW_ONLY
    rank: int
    start_step: int = 0
    workers: Workers = IN_PROCESS
    weigh: Weigh | None = None
    waited_s: float = field(default=0.0, init=False)

    def __iter__(self) -> Generator[MicroBatch, None, None]:
        """Start at `start_step`, with batches on the CPU."""
        return self.micro_batches()

    def micro_batches(
        self, transfer: BatchTransfer | None = None, loading: LoadingStop | None = None
    ) -> Generator[MicroBatch, None, None]:
        """Start at `start_step`.

        Args:
            transfer: brings the batches to the rank's device; None leaves them on the CPU.
            loading: stops the ranks while they wait for the first micro-batch of a step; None: nothing stops them.

        Raises:
            StopWhileLoading: the ranks stop.
        """
        planned, fetching = tee(plan_micro_batches(self.plan, self.order, self.rank, self.start_step))
        batches = fetch_batches(self.fetcher, map(attrgetter("request"), fetching), self.workers, loading)
        bookmarks = self.fetcher.bookmarks
        marks = deque[tuple[Bookmark, ...]]()
        weights = deque[tuple[float, int]]()
        if bookmarks is not None:
            batches = _split_off_marks(batches, marks)
        if self.weigh is not None:
            planned, weighed = tee(planned)
            batches = _weigh_batches(batches, map(attrgetter("num_samples"), weighed), self.weigh, weights)
        on_device = transfer is not None
        if transfer is not None:
            # Only loading processes may run ahead: data that this process reads may depend on what a step changes, and
            # a resume would read it in another state.
            batches = transfer_batches(batches, transfer, prefetch_one=self.workers.num_workers > 0)
        clock = time.perf_counter
        begin = clock()
        for batch, (request, num_samples, divisor, is_last) in zip(batches, planned, strict=False):
            self.waited_s += clock() - begin
            if bookmarks is not None:
                # only now: what is fetched or copied in advance isn't trained on yet
                bookmarks.add(marks.popleft())
            micro_batch = MicroBatch(batch, num_samples, divisor, is_last, request[1], on_device)
            if loading is not None:
                if loading.is_counted:
                    loading.arrived()
                loading.at_boundary = is_last
                # from now on the ranks save when they stop
                loading.interrupts = False
            if weights:
                weight, num_delivered = weights.popleft()
                micro_batch = micro_batch._replace(weight=weight, num_delivered=num_delivered)
            yield micro_batch
            begin = clock()


def _split_off_marks(fetched: Iterator[MarkedBatch], marks: deque[tuple[Bookmark, ...]]) -> Iterator[Any]:
    """Yield the batches, and append the bookmarks that came with them."""
    for batch, batch_marks in fetched:
        marks.append(batch_marks)
        yield batch


def _weigh_batches(
    fetched: Iterator[Any], planned: Iterator[int], weigh: Weigh, weights: deque[tuple[float, int]]
) -> Iterator[Any]:
    """Yield the batches, and append their weights.

    They are computed on the CPU: no rank waits for its GPU, and a weight of 0 is known before the loss is computed.
    """
    for batch, num_samples in zip(fetched, planned, strict=False):
        if isinstance(batch, CollatedBatch):
            content, num_delivered = batch
        else:
            content, num_delivered = batch, count_samples(batch, num_samples, num_samples)
        weights.append(weigh(content, num_samples, num_delivered))
        yield content


class PlannedMicroBatch(NamedTuple):
    """One micro-batch of one rank before it is fetched; `MicroBatch` explains the last three."""

    request: Request
    num_samples: int
    divisor: float
    is_last: bool


def plan_micro_batches(plan: BatchPlan, order: Order, rank: int, start_step: int) -> Iterator[PlannedMicroBatch]:
    """A rank's micro-batches from a step on, across epochs, without end.

    Raises:
        TaskError: the order returned a shape that differs from that of the positions.
    """
    # Each call of the order is for many steps, since its fixed cost would slow down a single step; the first calls are
    # for few steps, since every run and every resume begins with them.
    turns, width = plan.largest_step
    largest = max(1, min(_CHUNK_STEPS, _CHUNK_SAMPLES // (turns * width)))
    chunk = 1
    while True:
        steps = np.arange(start_step, start_step + chunk)
        starts, counts = plan.pieces(steps, rank)
        epochs = steps // plan.steps_per_epoch
        # an empty micro-batch gets a stand-in sample; its start may be one past the end, hence the bound
        positions = np.minimum(starts[..., None] + np.arange(width), plan.num_samples - 1)
        indices = _apply_order(order, epochs[:, None, None], positions)
        divisors = plan.divisors(steps, counts).tolist()
        lasts = ((counts >= 0).sum(axis=1) - 1).tolist()
        for row, (epoch, lengths, last) in enumerate(zip(epochs.tolist(), counts.tolist(), lasts, strict=True)):
            for micro_batch_index in range(last + 1):
                count = lengths[micro_batch_index]
                request = epoch, indices[row, micro_batch_index, : count or 1]
                yield PlannedMicroBatch(request, count, divisors[row][micro_batch_index], micro_batch_index == last)
        start_step += chunk
        chunk = min(2 * chunk, largest)


def _apply_order(order: Order, epochs: IntArray, positions: IntArray) -> IntArray:
    indices = np.asarray(order(epochs, positions), dtype=np.int64)
    if indices.shape != positions.shape:
        raise TaskError(
            f"the order {type(order).__name__} returned shape {indices.shape} for positions of shape "
            f"{positions.shape}: expected one sample index per position"
        )
    return indices


@dataclass(eq=False)
class EvalLoader:
    """Every sample exactly once over all ranks, without padding.

    Rank r has the r-th of world_size contiguous slices. Of an iterable dataset, whose end may not be known before it is
    reached, it has every world_size-th micro-batch, from the r-th on. With `__len__`, that many samples are evaluated.

    Ranks can have different numbers of batches, even none, so evaluation runs outside DDP, without a collective per
    batch. The samples' random draws depend only on the index: every evaluation sees the same samples.

    Attributes:
        dataset: the held-out samples (`BatchDataset` lists the protocols), or an iterable dataset.
        micro_batch_size: samples per batch; a rank's last one can be smaller.
        rank: the rank that evaluates the slice.
        world_size: number of slices.
        collate_fn: makes a batch of a list of samples; PyTorch's default collation if None.
        workers: how batches are fetched; worker processes are started for each pass.
        num_samples: of the dataset; None for an iterable dataset without `__len__`.
        end: number of samples before the end of an iterable dataset, if this rank reached it in its last pass.
        num_taken: samples in the batch of the last round; 0 in a round in which only other ranks have one.
    """

    dataset: Dataset[Any]
    micro_batch_size: int
    _: KW_ONLY
    rank: int
    world_size: int
    collate_fn: Collate | None = None
    workers: Workers = IN_PROCESS
    end: int | None = field(default=None, init=False)
    num_taken: int = field(default=0, init=False)
    _loading: LoadingStop | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if is_stream(self.dataset):
            self._fetcher: BatchFetcher = EpochFetcher(self.dataset, self.collate_fn)
        else:
            # not the run's seed: runs with different seeds should be compared on the same samples
            self._fetcher = BatchFetcher(self.dataset, 0, self.collate_fn)
        self.num_samples = self._fetcher.num_samples

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
        return math.ceil(math.ceil(num_samples / self.world_size) / self.micro_batch_size)

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
        max_rounds = min((bound for bound in (self.num_rounds, at_most) if bound is not None), default=None)
        if isinstance(self._fetcher, EpochFetcher):
            return self._rounds_of_stream(max_rounds)
        assert max_rounds is not None
        return self._rounds(max_rounds)

    def stand_in(self) -> Any | None:
        """Return a batch of the first sample, for a rank that only joins the passes of others; None without samples."""
        first = (0, np.arange(1))
        if isinstance(self._fetcher, EpochFetcher):
            # another reader: that of the rounds must stay where it is
            return EpochFetcher(self.dataset, self.collate_fn)[first].batch
        return self._fetcher[first] if self.num_samples else None

    def _rounds(self, max_rounds: int) -> Generator[Any, None, None]:
        size, num_samples = self.micro_batch_size, self.num_samples
        assert num_samples is not None
        begin, end = (num_samples * edge // self.world_size for edge in (self.rank, self.rank + 1))
        requests = ((0, np.arange(first, min(first + size, end))) for first in range(begin, end, size))
        num_batches = min(max_rounds, math.ceil((end - begin) / size))
        batches = self._fetch(itertools.islice(requests, num_batches), num_batches)
        for round_index in range(max_rounds):
            self.num_taken = max(0, min(size, end - begin - round_index * size))
            yield next(batches, None)

    def _rounds_of_stream(self, max_rounds: int | None) -> Generator[Any, None, None]:
        size, length = self.micro_batch_size, self.num_samples
        per_round = size * self.world_size
        slices = ((first, first + size) for first in itertools.count(self.rank * size, per_round))
        # empty where the slice begins after the length
        requests = ((0, np.arange(first, last if length is None else min(last, length))) for first, last in slices)
        batches: Iterator[EpochBatch] = self._fetch(itertools.islice(requests, max_rounds), max_rounds)
        self.end = None
        for round_index, (batch, end) in enumerate(batches):
            if end is not None:
                self.end = end
            # without a length, all ranks read the same stream, and find the same end, perhaps in different rounds
            if length is None and end is not None and round_index * per_round >= end:
                return
            first = round_index * per_round + self.rank * size
            bounds = [first + size, *(bound for bound in (length, self.end) if bound is not None)]
            self.num_taken = max(0, min(bounds) - first)
            yield batch

    def _fetch(self, requests: Iterator[Request], max_rounds: int | None) -> Iterator[Any]:
        num_workers = self.workers.num_workers
        workers = replace(self.workers, num_workers=num_workers if max_rounds is None else min(num_workers, max_rounds))
        return fetch_batches(self._fetcher, requests, workers, self._loading)

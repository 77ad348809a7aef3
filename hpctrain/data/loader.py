"""The training batches of one rank, from any step on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import tee
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from torch.utils.data import Dataset

from hpctrain.data.bookmark import Bookmarks
from hpctrain.data.fetch import BatchFetcher, Collate, CollatedBatch, Request
from hpctrain.data.keyed_random import IntArray
from hpctrain.data.micro_batch import MicroBatch, samples_in
from hpctrain.data.order import Order
from hpctrain.data.plan import BatchPlan
from hpctrain.data.transfer import BatchTransfer, transfer_batches
from hpctrain.data.workers import IN_PROCESS, Workers, fetch_batches
from hpctrain.errors import TaskError
from hpctrain.rank.agreement import LoadingStop

_CHUNK_STEPS = 256
_CHUNK_SAMPLES = 16_384


Weigh: TypeAlias = Callable[[Any, int, int], tuple[float, int]]
"""As `LossWeights.weigh`."""


class TrainLoader:
    """An endless iterable over this rank's micro-batches, in step order, across epochs.

    It has no state: the position is the loop's step counter, and a resume is a loader with that `start_step`. Batches
    that workers have prefetched don't count. Workers live as long as the iterator: call the iterator's `close()`.

    Args:
        dataset: the training samples (`BatchDataset` lists the protocols).
        order: maps positions of an epoch to samples.
        plan: the batch arithmetic.
        rank: the rank that trains on the micro-batches.
        seed: of the run; with epoch and index, the key of a sample's random draws.
        start_step: the first step, from 0, counted over the whole run.
        collate_fn: makes a batch of a list of samples; PyTorch's default collation if None.
        workers: how batches are fetched.
        bookmarks: of streams with a state: where to continue, and updated with each micro-batch; None: read from the
            start.
        weigh: returns the weight of a batch on the CPU, and the number of samples in it, from the batch, the planned
            number of samples, and the number of those that the batch holds; None: micro-batches have no weight.
        requires_all: whether to refuse a dataset that returns fewer samples than were asked for, if nothing is weighed.

    Attributes:
        waited_s: seconds that the consumer has waited for micro-batches so far, with their transfer.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        order: Order,
        plan: BatchPlan,
        *,
        rank: int,
        seed: int,
        start_step: int = 0,
        collate_fn: Collate | None = None,
        workers: Workers = IN_PROCESS,
        bookmarks: Bookmarks | None = None,
        weigh: Weigh | None = None,
        requires_all: bool = False,
    ) -> None:
        self._fetcher = BatchFetcher(
            dataset,
            seed,
            collate_fn,
            bookmarks=bookmarks,
            step_samples=plan.global_batch_size,
            counts=weigh is not None or (requires_all and collate_fn is None),
        )
        self._weigh = weigh
        self._bookmarks = bookmarks
        self._order = order
        self._plan = plan
        self._rank = rank
        self._start_step = start_step
        self._workers = workers
        self.waited_s = 0.0

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
        assignments, fetching = tee(assign(self._plan, self._order, self._rank, self._start_step))
        batches = fetch_batches(self._fetcher, map(attrgetter("request"), fetching), self._workers, loading)
        marked = self._fetcher.has_bookmarks
        on_device = transfer is not None
        weights = deque[tuple[float, int]]()
        if self._weigh is not None:
            assignments, weighed = tee(assignments)
            batches = self._weighed(batches, map(attrgetter("num_samples"), weighed), self._weigh, weights)
        if transfer is not None:
            batches = self._transferred(batches, transfer)
        clock = time.perf_counter
        begin = clock()
        for fetched, (request, num_samples, divisor, is_last) in zip(batches, assignments, strict=False):
            self.waited_s += clock() - begin
            batch = fetched
            if marked:
                assert self._bookmarks is not None
                batch, marks = fetched
                # only now: what is fetched or copied in advance isn't trained on yet
                self._bookmarks.add(marks)
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

    def _weighed(
        self, fetched: Iterator[Any], planned: Iterator[int], weigh: Weigh, weights: deque[tuple[float, int]]
    ) -> Iterator[Any]:
        """Yield the same batches, and append their weights, computed on the CPU so that no rank waits for its GPU."""
        for fetch, num_samples in zip(fetched, planned, strict=False):
            batch, marks = fetch if self._fetcher.has_bookmarks else (fetch, ())
            if isinstance(batch, CollatedBatch):
                batch, num_delivered = batch
            else:
                num_delivered = samples_in(batch, num_samples, num_samples)
            weights.append(weigh(batch, num_samples, num_delivered))
            yield (batch, marks) if self._fetcher.has_bookmarks else batch

    def _transferred(self, fetched: Iterator[Any], transfer: BatchTransfer) -> Iterator[Any]:
        # Only loading processes may run ahead: data that this process reads may depend on what a step changes, and a
        # resume would read it in another state.
        move = partial(transfer_batches, transfer=transfer, prefetch_one=self._workers.num_workers > 0)
        if not self._fetcher.has_bookmarks:
            return move(fetched)
        early, late = tee(fetched)
        return zip(move(batch for batch, _ in early), (marks for _, marks in late), strict=False)


class Assignment(NamedTuple):
    """One micro-batch of one rank before it is fetched; `MicroBatch` explains the last three."""

    request: Request
    num_samples: int
    divisor: float
    is_last: bool


def assign(plan: BatchPlan, order: Order, rank: int, start_step: int) -> Iterator[Assignment]:
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
        indices = _ordered(order, epochs[:, None, None], positions)
        divisors = plan.divisors(steps, counts).tolist()
        lasts = ((counts >= 0).sum(axis=1) - 1).tolist()
        for row, (epoch, lengths, last) in enumerate(zip(epochs.tolist(), counts.tolist(), lasts, strict=True)):
            for turn in range(last + 1):
                count = lengths[turn]
                request = epoch, indices[row, turn, : count or 1]
                yield Assignment(request, count, divisors[row][turn], turn == last)
        start_step += chunk
        chunk = min(2 * chunk, largest)


def _ordered(order: Order, epochs: IntArray, positions: IntArray) -> IntArray:
    indices = np.asarray(order(epochs, positions), dtype=np.int64)
    if indices.shape != positions.shape:
        raise TaskError(
            f"the order {type(order).__name__} returned shape {indices.shape} for positions of shape "
            f"{positions.shape}: expected one sample index per position"
        )
    return indices

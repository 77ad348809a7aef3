"""The training batches of one rank, from any step on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from hpctrain.data.assignment import Assignment, assign
from hpctrain.data.fetch import BatchFetcher, Collate, Request
from hpctrain.data.keyed import IntArray
from hpctrain.data.order import Order
from hpctrain.data.plan import BatchPlan
from hpctrain.data.tree import map_tensors
from hpctrain.data.workers import fetch_in_workers
from hpctrain.errors import TaskError


class MicroBatch(NamedTuple):
    """What one forward and backward pass works on.

    Attributes:
        batch: what the dataset and its collation give, on the CPU.
        num_samples: samples in it; 0 where the rank has none left in a partial step. The batch then holds one stand-in
            sample, with which the rank takes part in the collectives; its loss must not be counted.
        divisor: what the mean loss is divided by before backward (`BatchPlan.divisor`): the accumulation in a full
            step, infinite for a stand-in, so that its gradients are zero.
        is_last: the step's last micro-batch: synchronise gradients, then update.
        indices: the samples' numbers, int64; of a stand-in too.
        on_device: the batch is on the rank's device already (`hpctrain.data.prefetch`).
    """

    batch: Any
    num_samples: int
    divisor: float
    is_last: bool
    indices: IntArray
    on_device: bool = False


class TrainLoader:
    """An endless iterable over this rank's micro-batches, in step order, across epochs.

    Stateless: the position is the loop's step counter, and a resume is a loader with that `start_step`; what workers
    have fetched ahead doesn't count. Workers live as long as the iterator: end it with its `close()`.

    Args:
        dataset: with `__len__` and `__getitem__`; `BatchDataset` tells what else is used.
        order: which sample stands at which position of an epoch.
        plan: the batch arithmetic.
        rank: whose micro-batches.
        seed: of the run: with epoch and index the key of a sample's random draws.
        num_workers: processes that fetch; with 0 the batches are fetched in this process when they are asked for.
        start_step: the first step, from 0, counted over the whole run.
        pin_memory: return tensors in page-locked memory; without CUDA it has no effect.
        collate_fn: makes a batch of a list of samples; PyTorch's default collation if None.
        prefetch_factor: micro-batches that every worker fetches ahead.

    Attributes:
        waited_s: seconds that whoever iterates has waited for micro-batches so far.

    Raises:
        TaskError: the dataset has another length than the plan's.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        order: Order,
        plan: BatchPlan,
        *,
        rank: int,
        seed: int,
        num_workers: int = 0,
        start_step: int = 0,
        pin_memory: bool = False,
        collate_fn: Collate | None = None,
        prefetch_factor: int = 2,
    ) -> None:
        self._fetcher = BatchFetcher(dataset, seed, collate_fn)
        if self._fetcher.num_samples not in (None, plan.num_samples):
            raise TaskError(f"the dataset has {self._fetcher.num_samples} samples, the plan {plan.num_samples}")
        self._order, self._plan, self._rank, self._start_step = order, plan, rank, start_step
        self._num_workers, self._prefetch_factor = num_workers, prefetch_factor
        self._pin_memory = pin_memory and torch.cuda.is_available()
        self.waited_s = 0.0

    def __iter__(self) -> Generator[MicroBatch, None, None]:
        """Start at `start_step`."""
        assignments = assign(self._plan, self._order, self._rank, self._start_step)
        return self._from_workers(assignments) if self._num_workers else self._from_here(assignments)

    def _from_here(self, assignments: Iterator[Assignment]) -> Generator[MicroBatch, None, None]:
        fetcher, pin_memory, clock = self._fetcher, self._pin_memory, time.perf_counter
        asked = clock()
        for request, num_samples, divisor, is_last in assignments:
            batch = fetcher[request]
            if pin_memory:
                batch = map_tensors(torch.Tensor.pin_memory, batch)
            self.waited_s += clock() - asked
            yield MicroBatch(batch, num_samples, divisor, is_last, request[1])
            asked = clock()

    def _from_workers(self, assignments: Iterator[Assignment]) -> Generator[MicroBatch, None, None]:
        asked: deque[Assignment] = deque()

        def requests() -> Iterator[Request]:
            for assignment in assignments:
                asked.append(assignment)
                yield assignment.request

        batches = fetch_in_workers(
            self._fetcher,
            requests(),
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch_factor,
            pin_memory=self._pin_memory,
        )
        clock = time.perf_counter
        begin = clock()
        for batch in batches:
            request, num_samples, divisor, is_last = asked.popleft()
            self.waited_s += clock() - begin
            yield MicroBatch(batch, num_samples, divisor, is_last, request[1])
            begin = clock()

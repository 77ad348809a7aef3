from __future__ import annotations

import math
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from hpctrain.data.fetch import BatchFetcher, TensorBatches
from hpctrain.data.loader import TrainLoader
from hpctrain.data.micro_batch import MicroBatch
from hpctrain.data.order import ShuffledOrder
from hpctrain.data.plan import BatchPlan
from hpctrain.data.workers import Workers
from hpctrain.errors import TaskError
from hpctrain.rank.agreement import LoadingStop, StopWhileLoading
from hpctrain.rank.stop_request import StopRequest

SEED = 3


class Augmented(Dataset[Any]):
    """Samples of index, draws from the three generators, and the process that fetched them."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[int, float, float, torch.Tensor, int]:
        return index, random.random(), float(np.random.rand()), torch.rand(2), os.getpid()


def numbers(num_samples: int) -> TensorBatches:
    return TensorBatches(torch.arange(num_samples))


def loader(plan: BatchPlan, dataset: Dataset[Any] | None = None, **options: Any) -> TrainLoader:
    seed, collate_fn = options.pop("seed", SEED), options.pop("collate_fn", None)
    fetcher = BatchFetcher(dataset or numbers(plan.num_samples), seed, collate_fn)
    return TrainLoader(fetcher, ShuffledOrder(plan.num_samples, SEED), plan, **{"rank": 0, **options})


def first(count: int, batches: Iterable[MicroBatch]) -> list[MicroBatch]:
    iterator = iter(batches)
    taken = list(islice(iterator, count))
    iterator.close()  # type: ignore[attr-defined]
    return taken


def shown(batch: MicroBatch) -> tuple[Any, ...]:
    """A micro-batch as plain values, without the process that fetched it."""
    return (
        [field.tolist() for field in batch.batch[:4]],
        batch.num_samples,
        batch.divisor,
        batch.is_last,
        batch.indices.tolist(),
    )


def micro_batches(plan: BatchPlan, steps: range) -> int:
    return sum(plan.micro_batches(plan.step_samples(step)) for step in steps)


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    world_size, micro, accumulation = (draw(st.integers(1, most)) for most in (3, 4, 3))
    drop_last = draw(st.booleans())
    size = world_size * micro * accumulation
    return BatchPlan(draw(st.integers(size if drop_last else 1, 80)), size, micro, world_size, drop_last)


@settings(deadline=None)
@given(plan=plans(), start=st.integers(0, 20))
def test_the_ranks_together_get_the_order_that_the_plan_slices(plan: BatchPlan, start: int) -> None:
    order = ShuffledOrder(plan.num_samples, SEED)
    steps = range(start, start + 2 * plan.steps_per_epoch + 1)
    for rank in range(plan.world_size):
        batches = iter(first(micro_batches(plan, steps), loader(plan, rank=rank, start_step=start)))
        all_starts, all_counts = plan.pieces(np.array(steps), rank)
        all_divisors = plan.divisors(np.array(steps), all_counts)
        for step, starts, counts, divisors in zip(steps, all_starts, all_counts, all_divisors, strict=True):
            for turn in range(micro_batches(plan, range(step, step + 1))):
                batch = next(batches)
                positions = np.arange(starts[turn], starts[turn] + counts[turn])
                expected = order(step // plan.steps_per_epoch, positions).tolist()
                assert batch.num_samples == len(expected)
                assert batch.batch[0].tolist()[: batch.num_samples] == expected
                assert len(batch.batch[0]) == max(1, batch.num_samples)
                assert batch.divisor == divisors[turn]
                assert batch.is_last == (turn == micro_batches(plan, range(step, step + 1)) - 1)


@settings(deadline=None)
@given(plan=plans(), start=st.integers(0, 30))
def test_a_resumed_loader_continues_where_a_straight_one_is(plan: BatchPlan, start: int) -> None:
    before, after = micro_batches(plan, range(start)), micro_batches(plan, range(start, start + 5))
    dataset = Augmented(plan.num_samples)
    straight = first(before + after, loader(plan, dataset))[before:]
    resumed = first(after, loader(plan, dataset, start_step=start))
    assert [shown(batch) for batch in resumed] == [shown(batch) for batch in straight]


@pytest.mark.parametrize("start", [0, 3, 4, 9])  # an epoch has 4 steps
def test_workers_change_nothing(start: int) -> None:
    plan = BatchPlan(29, global_batch_size=8, micro_batch_size=2, world_size=2, drop_last=False)
    dataset = Augmented(29)
    here = first(20, loader(plan, dataset, rank=1, start_step=start))
    there = first(20, loader(plan, dataset, rank=1, start_step=start, workers=Workers(2)))
    assert [shown(batch) for batch in there] == [shown(batch) for batch in here]
    pids = {pid for batch in there for pid in batch.batch[4].tolist()}
    assert len(pids) == 2  # the same two through five epochs
    assert os.getpid() not in pids


def test_draws_belong_to_seed_epoch_and_index_at_any_world_size() -> None:
    def draws(world_size: int, seed: int = SEED) -> dict[tuple[int, int], tuple[float, ...]]:
        plan = BatchPlan(24, global_batch_size=8, micro_batch_size=2, world_size=world_size, drop_last=True)
        found = {}
        for rank in range(world_size):
            per_epoch = 3 * plan.accumulation
            for number, batch in enumerate(first(2 * per_epoch, loader(plan, Augmented(24), rank=rank, seed=seed))):
                for index, python, numpy, pytorch, _ in zip(*batch.batch, strict=True):
                    found[number // per_epoch, int(index)] = (float(python), float(numpy), *pytorch.tolist())
        return found

    alone = draws(1)
    assert len(alone) == 48
    assert len({value for values in alone.values() for value in values}) == 4 * 48
    assert draws(2) == draws(4) == alone
    assert not set(draws(1, seed=4).values()) & set(alone.values())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_processs_own_generators_are_not_disturbed(num_workers: int) -> None:
    plan = BatchPlan(16, 8, 4, 1, True)

    def streams() -> tuple[Any, ...]:
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

    before = streams()
    first(6, loader(plan, Augmented(16), workers=Workers(num_workers)))
    assert streams() == before


def test_a_rank_without_samples_gets_a_stand_in() -> None:
    plan = BatchPlan(9, global_batch_size=8, micro_batch_size=4, world_size=2, drop_last=False)
    _, last = first(2, loader(plan, rank=1))
    assert (last.num_samples, last.divisor, last.is_last) == (0, math.inf, True)
    assert len(last.batch[0]) == 1


def test_workers_outlive_the_signals_of_a_stop() -> None:
    plan = BatchPlan(64, 4, 4, 1, True)
    batches = iter(loader(plan, Augmented(64), workers=Workers(2, prefetch_factor=1)))
    pids = {int(next(batches).batch[4][0]) for _ in range(4)}
    for pid in pids:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(pid, number)
        assert os.spawnlp(os.P_WAIT, "sh", "sh", "-c", f"kill -TERM {pid}") == 0
    after = {int(next(batches).batch[4][0]) for _ in range(20)}
    assert after == pids
    batches.close()
    assert not multiprocessing.active_children()


class WithoutLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def test_a_dataset_that_cannot_be_indexed_is_refused() -> None:
    with pytest.raises(TaskError, match="expected __len__"):
        loader(BatchPlan(8, 4, 4, 1, True), WithoutLength())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_raises_stop_iteration_is_an_error_and_not_the_end_of_the_batches(num_workers: int) -> None:
    class Exhausted(Augmented):
        def __getitem__(self, index: int) -> Any:
            raise StopIteration

    plan = BatchPlan(8, 4, 4, 1, drop_last=True)
    with pytest.raises(TaskError, match="Exhausted raised StopIteration for samples of epoch 0"):
        first(1, loader(plan, Exhausted(8), workers=Workers(num_workers)))


def test_an_order_of_the_wrong_shape_is_refused() -> None:
    plan = BatchPlan(8, 4, 4, 1, True)
    with pytest.raises(TaskError, match="one sample index per position"):
        first(1, TrainLoader(BatchFetcher(numbers(8), 0), lambda epoch, positions: positions.ravel(), plan, rank=0))


def test_a_users_own_order_is_followed() -> None:
    plan = BatchPlan(8, 4, 2, 1, True)
    fetcher = BatchFetcher(numbers(8), 0)
    backwards = TrainLoader(fetcher, lambda epoch, positions: 7 - positions + 0 * epoch, plan, rank=0)
    assert [batch.batch[0].tolist() for batch in first(5, backwards)] == [[7, 6], [5, 4], [3, 2], [1, 0], [7, 6]]


class Sluggish(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        time.sleep(0.1)
        return index


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_wait_for_data_is_measured(num_workers: int) -> None:
    plan = BatchPlan(8, global_batch_size=4, micro_batch_size=2, world_size=1, drop_last=False)
    slow = loader(plan, Sluggish(), workers=Workers(num_workers))
    batches = iter(slow)
    next(batches)
    assert slow.waited_s >= 0.1  # half of it: a worker begins a moment before anybody waits for it
    before = slow.waited_s
    time.sleep(0.3)
    # the time between two requests isn't a wait
    assert slow.waited_s == before
    next(batches)
    assert slow.waited_s > before
    batches.close()


class Signalled(Dataset[Any]):
    """Counts in a state that a checkpoint may hold; a signal arrives while this sample is read."""

    def __init__(self, stop: StopRequest, at: int) -> None:
        self.stop, self.at, self.num_read = stop, at, 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        self.num_read += 1
        if self.num_read == self.at:
            self.stop._handle(signal.SIGTERM, None)
        return index


def test_a_signal_interrupts_no_read_after_the_first_step() -> None:
    """The stop after it saves the task's state, which a part of a read may have changed."""
    stop = StopRequest()
    dataset = Signalled(stop, at=3)
    plan = BatchPlan(6, 2, 2, 1, True)
    batches = loader(plan, dataset).micro_batches(loading=LoadingStop(stop))
    next(batches)
    next(batches)
    assert (dataset.num_read, stop.last_signal) == (4, signal.SIGTERM)
    interrupted = loader(plan, Signalled(StopRequest(), at=0)).micro_batches(loading=LoadingStop(stop))
    with pytest.raises(StopWhileLoading):
        next(interrupted)

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.keyed_random import IntArray
from hpctrain.data.loader import plan_micro_batches
from hpctrain.data.order import ShuffledOrder
from hpctrain.data.plan import BatchPlan
from hpctrain.errors import ConfigError, TaskError


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    world_size, micro, accumulation = (draw(st.integers(1, most)) for most in (6, 4, 4))
    drop_last = draw(st.booleans())
    size = world_size * micro * accumulation
    return BatchPlan(draw(st.integers(size if drop_last else 1, 150)), size, micro, world_size, drop_last)


def positions_of(plan: BatchPlan, step: int, rank: int) -> list[IntArray]:
    """Per micro-batch of a step."""
    starts, counts = plan.pieces(np.array([step]), rank)
    pieces = zip(starts[0].tolist(), counts[0].tolist(), strict=True)
    return [np.arange(start, start + count) for start, count in pieces if count >= 0]


def divisor_of(plan: BatchPlan, step: int, length: int) -> float:
    return float(plan.divisors(np.array([step]), np.array([[length]]))[0, 0])


def taken(plan: BatchPlan, step: int) -> list[int]:
    return [
        int(position)
        for rank in range(plan.world_size)
        for micro_batch in positions_of(plan, step, rank)
        for position in micro_batch
    ]


@settings(deadline=None)
@given(plan=plans(), epoch=st.integers(0, 3))
def test_every_sample_of_an_epoch_is_taken_exactly_once(plan: BatchPlan, epoch: int) -> None:
    first = epoch * plan.steps_per_epoch
    positions = [position for step in range(first, first + plan.steps_per_epoch) for position in taken(plan, step)]
    full = plan.num_samples // plan.global_batch_size * plan.global_batch_size
    assert sorted(positions) == list(range(full if plan.drop_last else plan.num_samples))
    assert len(positions) == plan.samples_per_epoch


@settings(deadline=None)
@given(plan=plans(), seed=st.integers(0, 2**32), epochs=st.integers(1, 3))
def test_every_sample_is_trained_on_exactly_once_an_epoch_in_an_order_of_its_own(
    plan: BatchPlan, seed: int, epochs: int
) -> None:
    """Over sizes of data, batch, world and accumulation, with and without the partial last step."""
    order = ShuffledOrder(plan.num_samples, seed)
    for epoch in range(epochs):
        whole = order(epoch, np.arange(plan.num_samples)).tolist()
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        by_rank = [
            [index for step in steps for taken in positions_of(plan, step, rank) for index in order(epoch, taken)]
            for rank in range(plan.world_size)
        ]
        together = [int(index) for indices in by_rank for index in indices]
        assert len(set(together)) == len(together) == plan.samples_per_epoch
        assert set(together) == set(whole[: plan.samples_per_epoch])


@settings(deadline=None)
@given(plan=plans(), step=st.integers(0, 40))
def test_a_step_takes_its_slice_of_the_epoch_at_any_world_size(plan: BatchPlan, step: int) -> None:
    begin = step % plan.steps_per_epoch * plan.global_batch_size
    slice_ = list(range(begin, min(begin + plan.global_batch_size, plan.num_samples)))
    assert len(slice_) == plan.step_samples(step)
    for world_size in range(1, 9):
        if plan.global_batch_size % (world_size * plan.micro_batch_size) == 0:
            other = BatchPlan(
                plan.num_samples, plan.global_batch_size, plan.micro_batch_size, world_size, plan.drop_last
            )
            assert sorted(taken(other, step)) == slice_


@settings(deadline=None)
@given(plan=plans(), step=st.integers(0, 40))
def test_all_ranks_have_as_many_micro_batches_and_none_is_too_large(plan: BatchPlan, step: int) -> None:
    for rank in range(plan.world_size):
        micro_batches = positions_of(plan, step, rank)
        assert len(micro_batches) == plan.micro_batches(plan.step_samples(step)) <= plan.accumulation
        assert all(len(positions) <= plan.micro_batch_size for positions in micro_batches)
    sizes = [len(p) for rank in range(plan.world_size) for p in positions_of(plan, step, rank)]
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(plan=plans(), step=st.integers(0, 40), data=st.data())
def test_the_divisors_make_the_mean_over_the_steps_samples(plan: BatchPlan, step: int, data: st.DataObject) -> None:
    values = np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=plan.num_samples)
    ranks = []
    for rank in range(plan.world_size):
        losses = [(values[p].mean() if p.size else 1.0, p.size) for p in positions_of(plan, step, rank)]
        ranks.append(sum(loss / divisor_of(plan, step, size) for loss, size in losses))
    assert np.mean(ranks) == pytest.approx(values[taken(plan, step)].mean())


@given(plans())
def test_single_samples_at_the_end_of_an_epoch_are_known(plan: BatchPlan) -> None:
    last = np.array([plan.steps_per_epoch - 1])
    lengths = np.concatenate([plan.pieces(last, rank)[1] for rank in range(plan.world_size)])
    assert plan.ends_with_single_samples == bool(plan.micro_batch_size > 1 and (lengths == 1).any())


def test_a_full_step_is_sliced_by_micro_batch_then_rank() -> None:
    plan = BatchPlan(20, global_batch_size=8, micro_batch_size=2, world_size=2, drop_last=True)
    assert plan.accumulation == 2
    assert [p.tolist() for p in positions_of(plan, 1, 0)] == [[8, 9], [12, 13]]
    assert [p.tolist() for p in positions_of(plan, 1, 1)] == [[10, 11], [14, 15]]
    assert divisor_of(plan, 1, 2) == 2.0


def test_a_partial_step_is_shared_as_evenly_as_possible() -> None:
    plan = BatchPlan(13, global_batch_size=8, micro_batch_size=2, world_size=2, drop_last=False)
    assert [p.tolist() for p in positions_of(plan, 1, 0)] == [[8, 9], [11]]
    assert [p.tolist() for p in positions_of(plan, 1, 1)] == [[10], [12]]
    assert divisor_of(plan, 1, 2) == 5 / 4
    lonely = BatchPlan(9, global_batch_size=8, micro_batch_size=2, world_size=2, drop_last=False)
    assert [p.tolist() for p in positions_of(lonely, 1, 0)] == [[8]]
    assert [p.tolist() for p in positions_of(lonely, 1, 1)] == [[]]
    assert divisor_of(lonely, 1, 0) == math.inf


@settings(deadline=None)
@given(plan=plans(), step=st.integers(0, 40))
def test_samples_seen_adds_up(plan: BatchPlan, step: int) -> None:
    assert plan.samples_seen(0) == 0
    assert plan.samples_seen(step + 1) - plan.samples_seen(step) == len(taken(plan, step))


@settings(deadline=None)
@given(plan=plans(), first=st.integers(0, 30))
def test_pieces_of_many_steps_are_those_of_each(plan: BatchPlan, first: int) -> None:
    steps = np.arange(first, first + 7)
    for rank in range(plan.world_size):
        for step, starts, counts in zip(steps.tolist(), *plan.pieces(steps, rank), strict=True):
            rows = [
                list(range(start, start + count))
                for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
                if count >= 0
            ]
            assert rows == [p.tolist() for p in positions_of(plan, step, rank)]


@pytest.mark.parametrize(
    ("arguments", "key", "hints"),
    [
        ((100, 12, 2, 4, True), "trainer.global_batch_size", ["8 or 16", "run 1, 2, 3 or 6 processes"]),
        ((100, 2, 4, 1, True), "trainer.global_batch_size", ["set it to 4"]),
        ((100, 128, 8, 1, True), "data.drop_last", ["100 samples", "data.drop_last=false"]),
    ],
)
def test_an_impossible_batch_is_refused_with_what_would_work(arguments: Any, key: str, hints: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        BatchPlan(*arguments)
    assert caught.value.key == key
    assert all(hint in str(caught.value) for hint in hints)


@pytest.mark.parametrize("micro_batch_size", [1, 10**3, 10**9])
def test_a_batch_beyond_the_dataset_takes_the_memory_of_the_dataset(micro_batch_size: int) -> None:
    plan = BatchPlan(1438, 10**9, micro_batch_size, 1, False)
    assert sorted(taken(plan, 0)) == list(range(1438))
    tracemalloc.start()
    request = next(plan_micro_batches(plan, ShuffledOrder(1438, 0), 0, 0)).request
    assert len(request[1]) <= 1438
    assert tracemalloc.get_traced_memory()[1] < 2e6
    tracemalloc.stop()


def test_an_empty_dataset_is_a_task_error() -> None:
    with pytest.raises(TaskError, match="no samples"):
        BatchPlan(0, 8, 8, 1, False)

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.loader import plan_micro_batches
from hpctrain.data.order import BucketOrder, ShuffledOrder
from hpctrain.data.plan import BatchPlan
from hpctrain.errors import TaskError

LENGTHS = np.random.default_rng(1).integers(1, 500, 1003)


@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 7), st.integers(0, 5))
def test_each_sample_once_per_epoch(num_samples, batch_size, pool_batches, epoch):
    order = BucketOrder(LENGTHS[:num_samples], 3, batch_size=batch_size, pool_batches=pool_batches)
    assert sorted(order(epoch, np.arange(num_samples))) == list(range(num_samples))


def padding(order):
    batches = LENGTHS[order(0, np.arange(1000))].reshape(50, 20)
    return 1 - batches.sum() / (20 * batches.max(1).sum())


def test_little_is_padded():
    assert padding(BucketOrder(LENGTHS, 0, batch_size=20)) == pytest.approx(0.02, abs=0.005)
    assert padding(BucketOrder(LENGTHS, 0, batch_size=20, pool_batches=25)) == pytest.approx(0.04, abs=0.005)
    assert padding(ShuffledOrder(1003, 0)) == pytest.approx(0.47, abs=0.005)


def test_the_batches_come_in_random_order():
    order = BucketOrder(LENGTHS, 0, batch_size=20, pool_batches=25)
    batches = LENGTHS[order(0, np.arange(1000))].reshape(50, 20)
    assert (np.diff(batches[:, 0]) < 0).mean() == pytest.approx(0.5, abs=0.2)
    assert order(0, np.arange(1000)).tolist() != order(1, np.arange(1000)).tolist()
    assert BucketOrder(LENGTHS, 1, batch_size=20)(0, np.arange(9)).tolist() != order(0, np.arange(9)).tolist()


def test_the_incomplete_batch_has_random_lengths_and_is_last():
    last = [LENGTHS[BucketOrder(LENGTHS, seed, batch_size=20)(0, np.arange(1000, 1003))] for seed in range(20)]
    assert all(np.ptp(lengths) < 100 for lengths in last)
    assert np.ptp([lengths.mean() for lengths in last]) > 200


def test_any_shape_gives_the_same_samples():
    order = BucketOrder(LENGTHS, 0, batch_size=8, pool_batches=4)
    epochs, positions = np.array([[[0]], [[5]]]), np.arange(96).reshape(2, 4, 12)
    found = order(epochs, positions)
    assert found.shape == (2, 4, 12)
    assert found[1, 3, 7] == order(5, positions[1, 3, 7:8])[0]
    assert order(0, np.array(7)).shape == ()


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_step_has_the_same_samples_at_any_world_size(drop_last):
    def steps(world_size, start):
        plan = BatchPlan(len(LENGTHS), 24, 2, world_size, drop_last=drop_last)
        found = [[] for _ in range(50)]
        for rank in range(world_size):
            step = 0
            order = BucketOrder(LENGTHS, 0, batch_size=24, pool_batches=3)
            for entry in plan_micro_batches(plan, order, rank, start):
                found[step] += entry.request[1].tolist() if entry.num_samples else []
                step += entry.is_last
                if step == 50:
                    break
        return [sorted(step) for step in found]

    straight = steps(1, 0)
    assert steps(2, 0) == steps(3, 0) == straight
    assert steps(2, 30)[:20] == straight[30:]


@pytest.mark.parametrize("lengths", [[], [[1, 2]], ["a"], 3])
def test_lengths_that_are_none_are_refused(lengths):
    with pytest.raises(TaskError, match="expected one length per sample, got"):
        BucketOrder(lengths, 0, batch_size=2)
    with pytest.raises(TaskError, match="at least 1, got batch_size=0"):
        BucketOrder([1], 0, batch_size=0)

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.order import ShuffledOrder, WeightedOrder, sequential
from hpctrain.errors import TaskError


def deviations(counts: np.ndarray, expected: float) -> float:
    """Chi-square of equal expected counts, in standard deviations from its mean."""
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def epochs_of(num_samples: int, epochs: int, seed: int = 3) -> np.ndarray:
    return ShuffledOrder(num_samples, seed)(np.arange(epochs)[:, None], np.arange(num_samples))


@given(num_samples=st.integers(1, 5000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_every_epoch_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    indices = ShuffledOrder(num_samples, seed)(epoch, np.arange(num_samples))
    assert indices.dtype == np.int64
    assert np.array_equal(np.sort(indices), np.arange(num_samples))


@given(num_samples=st.integers(1, 2**62), data=st.data())
def test_positions_of_any_size_stay_inside_and_apart(num_samples: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, num_samples - 1), unique=True, max_size=50))
    indices = ShuffledOrder(num_samples, 1)(2, np.array(positions, dtype=np.int64))
    assert len(set(indices.tolist())) == len(positions)
    assert all(0 <= index < num_samples for index in indices.tolist())


@given(num_samples=st.integers(1, 3000), data=st.data())
def test_an_element_depends_on_its_own_epoch_and_position_only(num_samples: int, data: st.DataObject) -> None:
    order = ShuffledOrder(num_samples, 5)
    epochs = data.draw(st.lists(st.integers(0, 10), min_size=1, max_size=4))
    positions = data.draw(st.lists(st.integers(0, num_samples - 1), min_size=1, max_size=9))
    table = order(np.array(epochs)[:, None], np.array(positions))
    for row, epoch in zip(table, epochs, strict=True):
        alone = [int(order(epoch, np.array(position))) for position in positions]
        assert row.tolist() == alone


def test_the_order_is_the_same_on_every_platform_and_in_every_version() -> None:
    assert ShuffledOrder(10, 0)(0, np.arange(10)).tolist() == [5, 3, 6, 2, 1, 0, 4, 8, 7, 9]
    assert ShuffledOrder(10**9, 42)(7, np.arange(5)).tolist() == [964465014, 819360076, 761295967, 971072671, 370297279]


def test_seeds_and_epochs_give_unrelated_orders() -> None:
    orders = [ShuffledOrder(10_000, seed)(epoch, np.arange(10_000)) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    for one, first in enumerate(orders):
        for second in orders[:one]:
            assert (first == second).sum() < 10  # one is expected
            assert abs(np.corrcoef(first, second)[0, 1]) < 0.04


@pytest.mark.parametrize("num_samples", [2, 3, 4, 5, 6])
def test_all_permutations_of_a_few_samples_are_equally_likely(num_samples: int) -> None:
    permutations = epochs_of(num_samples, 200 * math.factorial(num_samples))
    codes = (permutations * num_samples ** np.arange(num_samples)).sum(axis=1)
    _, counts = np.unique(codes, return_counts=True)
    assert counts.size == math.factorial(num_samples)
    assert abs(deviations(counts, 200)) < 4


def randperms(num_samples: int, epochs: int) -> np.ndarray:
    generator = torch.Generator().manual_seed(0)
    return torch.stack([torch.randperm(num_samples, generator=generator) for _ in range(epochs)]).numpy()


@pytest.mark.parametrize("num_samples", [7, 12, 16, 33, 64, 100, 256, 257, 1025])
def test_positions_and_pairs_are_spread_evenly(num_samples: int) -> None:
    epochs = 300 * num_samples
    columns = np.array([0, 1, 2, num_samples // 2, num_samples - 1])
    ours = ShuffledOrder(num_samples, 3)(np.arange(epochs)[:, None], columns)
    samples = [ours, randperms(num_samples, epochs)[:, columns]] if num_samples < 40 else [ours]
    for indices in samples:
        for column in indices.T:
            assert abs(deviations(np.bincount(column, minlength=num_samples), 300)) < 4
        for column in indices.T[1:]:
            gaps = np.bincount((column - indices[:, 0]) % num_samples, minlength=num_samples)
            assert gaps[0] == 0
            assert abs(deviations(gaps[1:], epochs / (num_samples - 1))) < 4


@pytest.mark.parametrize("num_samples", [50_000, 65_536, 1_000_003])
def test_a_large_epoch_looks_like_randperm(num_samples: int) -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = torch.randperm(num_samples, generator=generator).numpy()
    ours = ShuffledOrder(num_samples, 0)(0, np.arange(num_samples))
    for indices in (ours, theirs):
        bins = 32
        where = np.arange(num_samples) * bins // num_samples
        what = indices * bins // num_samples
        spread = np.bincount(where * bins + what, minlength=bins * bins)
        assert abs(deviations(spread, num_samples / bins**2)) < 4
        neighbours = np.bincount(what[:-1] * bins + what[1:], minlength=bins * bins)
        assert abs(deviations(neighbours, num_samples / bins**2)) < 4
        assert abs(np.corrcoef(indices[:-1], indices[1:])[0, 1]) < 4 / math.sqrt(num_samples)
        low_bits = np.bincount(indices[:-1] % 8 * 8 + indices[1:] % 8, minlength=64)
        assert abs(deviations(low_bits, num_samples / 64)) < 4


@pytest.mark.parametrize("draw", [epochs_of, randperms])
def test_cycles_are_as_long_as_those_of_random_permutations(draw: Callable[[int, int], np.ndarray]) -> None:
    """As many fixed points and cycles as theory says of a uniform permutation; torch.randperm passes the same test."""
    num_samples, epochs = 300, 1500
    fixed, cycles, shortest = [], [], []
    for permutation in draw(num_samples, epochs).tolist():
        fixed.append(sum(index == position for position, index in enumerate(permutation)))
        lengths = cycle_lengths(permutation)
        cycles.append(len(lengths))
        shortest.append(sum(length <= 3 for length in lengths))
    harmonic = sum(1 / length for length in range(1, num_samples + 1))
    variance = harmonic - sum(1 / length**2 for length in range(1, num_samples + 1))
    assert abs(np.mean(fixed) - 1) < 4 * math.sqrt(1 / epochs)
    assert abs(np.mean(cycles) - harmonic) < 4 * math.sqrt(variance / epochs)
    few = 1 + 1 / 2 + 1 / 3  # cycles of length n are 1 / n on average, and nearly Poisson
    assert abs(np.mean(shortest) - few) < 4 * math.sqrt(few / epochs)


def cycle_lengths(permutation: list[int]) -> list[int]:
    seen, lengths = [False] * len(permutation), []
    for start in range(len(permutation)):
        length, place = 0, start
        while not seen[place]:
            seen[place], place, length = True, permutation[place], length + 1
        if length:
            lengths.append(length)
    return lengths


@pytest.mark.parametrize("position", [0, 10**9 // 2, 10**9 - 64])
def test_a_billion_samples_cost_nothing(position: int) -> None:
    """Begun anew and resumed anywhere: under a millisecond, under a megabyte."""
    positions, seconds = np.arange(position, position + 64), []
    ShuffledOrder(1000, 1)(0, positions % 1000)
    tracemalloc.start()
    for _ in range(3):
        ShuffledOrder(10**9, 1)(3, positions)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    for _ in range(200):
        begin = time.perf_counter()
        ShuffledOrder(10**9, 1)(3, positions)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 1e-3
    assert peak < 1 << 20


def test_sequential_is_the_position_itself() -> None:
    order = sequential
    assert order(3, np.array([2, 0])).tolist() == [2, 0]
    assert order(np.array([[0], [1]]), np.array([2, 0])).tolist() == [[2, 0], [2, 0]]


def test_weighted_draws_follow_the_weights():
    weights = np.array([1.0, 0.0, 3.0, 6.0])
    draws = WeightedOrder(weights, seed=3)(0, np.arange(20000))
    counts = np.bincount(draws, minlength=4)
    assert counts[1] == 0
    assert np.allclose(counts / 20000, weights / 10, atol=0.015)


def test_weighted_draws_depend_on_seed_epoch_and_position_alone():
    order = WeightedOrder(np.ones(50), seed=3)
    whole = order(np.array([[0], [1]]), np.arange(100)[None])
    assert np.array_equal(order(1, np.arange(40, 60)), whole[1, 40:60])
    assert not np.array_equal(whole[0], whole[1])
    assert not np.array_equal(whole[0], WeightedOrder(np.ones(50), seed=4)(0, np.arange(100)))


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -1.0], [float("nan")], [[1.0]]])
def test_impossible_weights_are_refused(weights):
    with pytest.raises(TaskError, match="expected one finite weight per sample"):
        WeightedOrder(weights, seed=0)


def test_weights_whose_sum_overflows_are_drawn_in_proportion():
    weights = np.array([1.0, 3.0, 0.0, 4.0, 0.0])
    positions = np.arange(400)
    expected = WeightedOrder(weights, 5)(0, positions)
    assert np.array_equal(WeightedOrder(weights * 2.0**1021, 5)(0, positions), expected)
    assert set(expected) == {0, 1, 3}

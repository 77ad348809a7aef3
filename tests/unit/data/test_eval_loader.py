from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from hpctrain.data.fetch import TensorBatches
from hpctrain.data.loader import EvalLoader
from hpctrain.data.workers import Workers
from hpctrain.errors import TaskError


class Ended(Dataset[Any]):
    """Reads on from an iterator that has ended."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return next(iter(range(0)))


def test_a_dataset_that_raises_stop_iteration_is_an_error_and_leaves_no_sample_out() -> None:
    with pytest.raises(TaskError, match="Ended raised StopIteration"):
        list(EvalLoader(Ended(), 2, rank=0, world_size=1, workers=Workers(1)).rounds())


class Drawing(Dataset[Any]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(torch.rand(()))


@settings(deadline=None)
@given(num_samples=st.integers(0, 60), micro=st.integers(1, 9), world_size=st.integers(1, 9))
def test_every_sample_is_seen_exactly_once(num_samples: int, micro: int, world_size: int) -> None:
    dataset = TensorBatches(torch.arange(num_samples))
    seen, shares, numbers = [], [], []
    for rank in range(world_size):
        loader = EvalLoader(dataset, micro, rank=rank, world_size=world_size)
        rounds = list(loader.rounds())
        batches = [batch[0].tolist() for batch in rounds if batch is not None]
        assert all(0 < len(batch) <= micro for batch in batches)
        numbers.append(len(rounds))
        assert rounds[len(batches) :] == [None] * (len(rounds) - len(batches))
        assert len(list(loader.rounds(2))) == min(2, len(rounds))
        shares.append(sum(map(len, batches)))
        seen += [index for batch in batches for index in batch]
    assert seen == list(range(num_samples))
    assert max(shares) - min(shares) <= 1
    assert len(set(numbers)) == 1


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_every_pass_is_the_same_with_any_number_of_workers(num_workers: int) -> None:
    expected = [
        [field.tolist() for field in batch] for batch in EvalLoader(Drawing(), 2, rank=1, world_size=2).rounds()
    ]
    loader = EvalLoader(Drawing(), 2, rank=1, world_size=2, workers=Workers(num_workers))
    for _ in range(2):
        assert [[field.tolist() for field in batch] for batch in loader.rounds()] == expected


def test_a_rank_without_samples_starts_no_worker() -> None:
    # those of a test before this one may still be ending
    earlier = multiprocessing.active_children()
    loader = EvalLoader(TensorBatches(torch.arange(1)), 2, rank=0, world_size=2, workers=Workers(2))
    assert list(loader.rounds()) == [None]
    assert set(multiprocessing.active_children()) <= set(earlier)


class Endless(IterableDataset[Any]):
    """As long as it is told, but it has no `__len__`."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(self.length))


class Seekable(Endless):
    def read_from(self, epoch: int, position: int) -> Iterator[torch.Tensor]:
        return iter(torch.arange(position, max(position, self.length)))


@settings(deadline=None)
@given(
    length=st.integers(0, 40),
    micro=st.integers(1, 7),
    world_size=st.integers(1, 5),
    kind=st.sampled_from([Endless, Seekable]),
)
def test_a_stream_without_a_length_is_seen_exactly_once_in_as_many_turns_on_every_rank(
    length: int, micro: int, world_size: int, kind: type[Endless]
) -> None:
    loaders = [EvalLoader(kind(length), micro, rank=rank, world_size=world_size) for rank in range(world_size)]
    for _ in range(2):
        rounds = [list(loader.rounds()) for loader in loaders]
        seen = [index for own in rounds for batch in own if batch is not None for index in batch.tolist()]
        assert sorted(seen) == list(range(length))
        assert {len(own) for own in rounds} == {-(-length // (micro * world_size))}
        assert {len(list(loader.rounds(2))) for loader in loaders} == {min(2, len(rounds[0]))}


class Declared(Seekable):
    """It says how long it is, and may end earlier or later."""

    def __init__(self, length: int, declared: int) -> None:
        super().__init__(length)
        self.declared = declared

    def __len__(self) -> int:
        return self.declared


@settings(deadline=None)
@given(
    length=st.integers(0, 60),
    declared=st.integers(0, 40),
    micro=st.integers(1, 7),
    world_size=st.integers(1, 5),
)
def test_a_stream_with_a_length_is_evaluated_up_to_it_in_as_many_turns_on_every_rank(
    length: int, declared: int, micro: int, world_size: int
) -> None:
    dataset = Declared(length, declared)
    loaders = [EvalLoader(dataset, micro, rank=rank, world_size=world_size) for rank in range(world_size)]
    rounds = [list(loader.rounds()) for loader in loaders]
    seen = [index for own in rounds for batch in own if batch is not None for index in batch.tolist()]
    assert sorted(seen) == list(range(min(length, declared)))
    assert {len(own) for own in rounds} == {-(-declared // (micro * world_size))} == {loaders[0].num_rounds}
    assert {len(list(loader.rounds(2))) for loader in loaders} == {min(2, len(rounds[0]))}


@pytest.mark.parametrize("length", [9, 10, 11, 12])
def test_worker_processes_find_the_end_of_a_stream(length: int) -> None:
    loaders = [EvalLoader(Endless(length), 2, rank=rank, world_size=2, workers=Workers(2)) for rank in range(2)]
    rounds = [list(loader.rounds()) for loader in loaders]
    assert sorted(index for own in rounds for batch in own if batch is not None for index in batch.tolist()) == [
        *range(length)
    ]
    assert [len(own) for own in rounds] == [3, 3]
    assert [loader.end for loader in loaders] == [length, length]
    assert len(list(loaders[0].rounds(2))) == 2

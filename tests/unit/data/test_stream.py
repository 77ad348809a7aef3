import logging
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from hpctrain.data.fetch import BatchFetcher
from hpctrain.data.loader import EvalLoader, TrainLoader
from hpctrain.data.order import sequential
from hpctrain.data.plan import BatchPlan
from hpctrain.data.stream import StreamReader
from hpctrain.data.workers import Workers
from hpctrain.errors import TaskError


class Replayed(IterableDataset):
    """Numbers that name epoch and position."""

    def __init__(self, length=20):
        self.length, self.epoch, self.read = length, 0, 0

    def __len__(self):
        return self.length

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for position in range(self.length):
            self.read += 1
            yield torch.tensor(1000 * self.epoch + position)


class Seeking(Replayed):
    def read_from(self, epoch, position):
        for place in range(position, self.length):
            self.read += 1
            yield torch.tensor(1000 * epoch + place)


def batches(stream, steps, *, rank=0, world_size=1, start_step=0, num_workers=0):
    plan = BatchPlan(20, 4, 2, world_size, drop_last=False)
    loader = iter(
        TrainLoader(
            BatchFetcher(stream, 0), sequential, plan, rank=rank, start_step=start_step, workers=Workers(num_workers)
        )
    )
    found = [next(loader).batch.tolist() for _ in range(steps * plan.accumulation)]
    loader.close()
    return found


@pytest.mark.parametrize("kind", [Replayed, Seeking])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_stream_continues_where_the_straight_run_was(kind, num_workers):
    straight = batches(kind(), 12)
    assert straight[:3] == [[0, 1], [2, 3], [4, 5]]
    assert straight[10] == [1000, 1001]
    for start_step in (1, 4, 5, 7):
        resumed = batches(kind(), 12 - start_step, start_step=start_step, num_workers=num_workers)
        assert resumed == straight[2 * start_step :]


@pytest.mark.parametrize("kind", [Replayed, Seeking])
def test_the_ranks_share_a_step(kind):
    zero, one = (batches(kind(), 6, rank=rank, world_size=2) for rank in (0, 1))
    assert zero[:2] == [[0, 1], [4, 5]]
    assert one[:2] == [[2, 3], [6, 7]]


def test_a_stream_that_can_seek_reads_nothing_twice():
    stream = Seeking()
    batches(stream, 1, start_step=4)
    assert stream.read == 4


def test_a_stream_that_cannot_seek_is_replayed():
    assert StreamReader(Replayed(5000)).read(0, np.array([3000, 3001])) == [3000, 3001]


class EndingReplayed(IterableDataset):
    """Epoch 0 has eight samples, epoch 1 has six, and so on in turn."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for position in range(8 - 2 * (self.epoch % 2)):
            yield torch.tensor(1000 * self.epoch + position)


class EndingSeeking(EndingReplayed):
    def read_from(self, epoch, position):
        self.epoch = epoch
        return islice(iter(self), position, None)


@pytest.mark.parametrize("kind", [EndingReplayed, EndingSeeking])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_that_ends_early_begins_its_next_epoch(kind, num_workers):
    straight = batches(kind(), 5)
    assert [number for batch in straight for number in batch] == [*range(8), *range(1000, 1006), *range(2000, 2006)]
    for start_step in range(1, 5):
        resumed = batches(kind(), 5 - start_step, start_step=start_step, num_workers=num_workers)
        assert resumed == straight[2 * start_step :]
    halves = [batches(kind(), 5, rank=rank, world_size=2, num_workers=num_workers) for rank in (0, 1)]
    assert [batch for pair in zip(*halves, strict=True) for batch in pair] == straight


def test_a_stream_that_is_shorter_than_its_length_begins_its_next_epoch_with_a_warning(caplog):
    class Short(Replayed):
        def __iter__(self):
            return islice(super().__iter__(), 18)

    with caplog.at_level(logging.WARNING, "hpctrain.data"):
        found = batches(Short(), 6)
    assert found[8:] == [[16, 17], [1000, 1001], [1000, 1001], [1002, 1003]]
    (message,) = caplog.messages
    assert message.startswith("Short ended after 18 samples of epoch 0: its next epoch begins; make its __len__")


def test_a_stream_that_yields_nothing_is_refused():
    class Once(EndingReplayed):
        def __iter__(self):
            return super().__iter__() if self.epoch == 0 else iter(())

    with pytest.raises(TaskError, match="Once has no samples in epoch 1, but some are needed"):
        batches(Once(), 3)


def test_evaluation_takes_each_sample_once():
    found = [EvalLoader(Replayed(7), 2, rank=rank, world_size=3) for rank in range(3)]
    assert sorted(
        value for loader in found for batch in loader.rounds() if batch is not None for value in batch.tolist()
    ) == list(range(7))

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from hpctrain.data import bookmark
from hpctrain.data.bookmark import Bookmark, Bookmarks, StateClock, fresh_copy
from hpctrain.data.fetch import BatchFetcher
from hpctrain.data.loader import EvalLoader, TrainLoader
from hpctrain.data.order import sequential
from hpctrain.data.plan import BatchPlan
from hpctrain.data.stream import ShardedStream, ShuffledStream, StreamReader, describe_resume_cost, has_bookmarks
from hpctrain.data.workers import Workers
from hpctrain.errors import ConfigError, TaskError
from tests.unit.stream_steps import read_steps

PLAN = BatchPlan(48, 8, 2, 2, drop_last=False)


@pytest.fixture(autouse=True)
def a_bookmark_with_every_batch(monkeypatch):
    monkeypatch.setattr(bookmark, "TIME_SHARE", 1e9)


class Shared(list):
    """A list that copies of a stream share, as they share all that isn't a plain container."""


class Counting:
    """Numbers that name stream, epoch and position; no subclass of anything, and read only from its state on."""

    def __init__(self, length=48, first=0):
        self.length = length
        self.first = first
        self.epoch = 0
        self.place = 0
        self.read = Shared()

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        while self.place < self.length:
            self.place += 1
            number = self.first + 1000 * self.epoch + self.place - 1
            self.read.append(number)
            yield torch.tensor(number)

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class InPlace(Counting):
    """Gives away the dict in which it counts, and counts on in the one that it is given."""

    def __init__(self, length=48):
        super().__init__(length)
        self.state = {"at": [{"place": 0}]}

    def __iter__(self):
        at = self.state["at"][0]
        while at["place"] < self.length:
            at["place"] += 1
            yield torch.tensor(1000 * self.epoch + at["place"] - 1)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Node:
    count = -1
    place = 0


class Graph:
    """Counts its passes inside of another object, as the loader of torchdata's nodes does."""

    def __init__(self, length=48):
        self.node = Node()
        self.state = None
        self.length = length

    def __len__(self):
        return 48

    def __iter__(self):
        node = self.node
        node.count, node.place = (node.count + 1, 0) if self.state is None else self.state
        while node.place < self.length:
            node.place += 1
            yield torch.tensor(1000 * node.count + node.place - 1)

    def state_dict(self):
        return {"count": self.node.count, "place": self.node.place}

    def load_state_dict(self, state):
        self.state = state["count"], state["place"]


class Split(IterableDataset):
    """Splits itself among loading processes, as PyTorch's documentation shows."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return map(torch.tensor, range(first, 48, step))


class Plain(IterableDataset):
    def __iter__(self):
        return iter(range(48))


def read(stream, steps, marks=(), *, world_size=2, plan=None, **options):
    plan = plan or BatchPlan(48, 8, 2, world_size, drop_last=False)
    return read_steps(lambda: stream, plan, steps, marks, **options)


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (2, 0), (4, 0), (1, 2)])
def test_a_stream_with_a_state_continues_at_any_world_size(world_size, num_workers):
    straight, _ = read(Counting(), 9)
    assert straight[0] == list(range(8))
    assert straight[6] == list(range(1000, 1008))  # the second epoch
    for stop in (1, 4, 5, 6, 7):
        _, marks = read(Counting(), stop)
        resumed, _ = read(Counting(), 9 - stop, marks, start_step=stop, world_size=world_size, num_workers=num_workers)
        assert resumed == straight[stop:]


def test_only_what_lies_after_the_bookmark_is_read_again():
    _, marks = read(Counting(), 4, world_size=1)
    (mark,) = marks
    assert mark.position == 30  # the last micro-batch of step 3 begins there
    assert mark.state == {"place": 30}
    stream = Counting()
    read(stream, 1, marks, start_step=4, world_size=1)
    assert stream.read == list(range(30, 40))
    assert stream.place == 0  # the original is left alone


def test_what_was_fetched_in_advance_is_not_marked():
    stream = Counting()
    _, marks = read(stream, 1, world_size=1, num_workers=1)
    (mark,) = marks
    assert mark.position == 6


def test_bookmarks_of_another_epoch_or_beyond_the_position_do_not_count():
    for mark in (Bookmark(0, 1, 1, 0, 2, {"place": 2}), Bookmark(0, 0, 0, 0, 9, {"place": 9})):
        stream = Counting()
        assert StreamReader(stream, Bookmarks([mark])).read(0, np.array([8]))[0] == 8
        assert stream.read[0] == 0


def test_a_stream_that_ended_early_continues_in_its_later_pass():
    endless = BatchPlan(400, 8, 8, 1, drop_last=False)
    straight, _ = read(Counting(20), 8, plan=endless, world_size=1)
    assert straight[2] == [16, 17, 18, 19, 1000, 1001, 1002, 1003]
    for stop in range(1, 8):
        _, marks = read(Counting(20), stop, plan=endless, world_size=1)
        resumed, _ = read(Counting(20), 8 - stop, marks, start_step=stop, plan=endless, world_size=1)
        assert resumed == straight[stop:]


def test_a_stream_that_counts_its_passes_continues_in_the_right_one():
    straight, _ = read(Graph(), 15, world_size=1)
    assert [step[0] for step in straight[::6]] == [0, 1000, 2000]
    for stop in range(1, 15):
        _, marks = read(Graph(), stop, world_size=1, num_workers=2 * (stop == 6))
        assert read(Graph(), 15 - stop, marks, start_step=stop, world_size=1)[0] == straight[stop:]


@pytest.mark.parametrize("length", [48, 40])
def test_a_stream_that_counts_its_passes_may_have_an_old_bookmark_or_none(length):
    straight, _ = read(Graph(length), 15, world_size=1)
    _, old = read(Graph(length), 4, world_size=1)
    for marks in (old, ()):
        for stop in (6, 7, 13, 14):
            assert read(Graph(length), 15 - stop, marks, start_step=stop, world_size=1)[0] == straight[stop:]


@pytest.mark.parametrize("make", [InPlace, lambda: ShuffledStream(InPlace(23), 10, seed=1)])
def test_a_stream_may_change_its_state_in_place(make, monkeypatch):
    plan = BatchPlan(460, 4, 4, 1, drop_last=False)
    straight, _ = read(make(), 14, plan=plan, world_size=1)
    assert sorted(number for step in straight for number in step)[:23] == list(range(23))
    for stop in range(1, 14):
        _, marks = read(make(), stop, plan=plan, world_size=1)
        resumed, _ = read(make(), 14 - stop, marks, start_step=stop, plan=plan, world_size=1)
        assert resumed == straight[stop:]
        # the marks that it continued from may be saved once more
        resumed, _ = read(make(), 14 - stop, marks, start_step=stop, plan=plan, world_size=1)
        assert resumed == straight[stop:]


class Slots:
    __slots__ = ("place",)

    def __iter__(self):
        return iter(range(48))

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Registered(dict):
    """As a type of a C extension, it can't be made without its arguments."""

    def __new__(cls, name):
        return super().__new__(cls)

    def __init__(self, name):
        super().__init__(name=name)

    state_dict = Slots.state_dict
    load_state_dict = Slots.load_state_dict


def test_a_stream_without_attributes_to_copy_is_refused():
    with pytest.raises(TaskError, match=r"the attributes of Slots are in __slots__ .*: remove its __slots__"):
        read(Slots(), 1)
    with pytest.raises(
        TaskError, match=r"copy of the Registered, which can't be made without arguments: let its __new__"
    ):
        fresh_copy(Registered("mine"))


def test_a_stateful_attribute_that_cannot_be_copied_is_shared():
    stream = Counting()
    stream.source, stream.sources = Slots(), [Registered("mine")]
    copied = fresh_copy(stream)
    assert copied.source is stream.source
    assert copied.sources[0] is stream.sources[0]
    assert copied.sources is not stream.sources


@pytest.mark.parametrize(("start_step", "marked", "samples"), [(0, False, None), (12, False, 96), (12, True, 88)])
def test_reading_earlier_epochs_again_is_logged_once(caplog, monkeypatch, start_step, marked, samples):
    monkeypatch.setattr("hpctrain.data.stream.TOLERATED_REPLAY", 80)
    marks = [Bookmark(0, 0, 0, 0, 8, {"count": 0, "place": 8})] if marked else []
    plan = BatchPlan(48, 8, 8, 1, drop_last=False)
    read(Graph(), 8, marks, start_step=start_step, plan=plan, world_size=1)
    expected = f"Graph has no set_epoch: {samples} samples of earlier epochs are read and discarded"
    assert [expected in record.message for record in caplog.records] == ([] if samples is None else [True])


@pytest.mark.parametrize(("place", "is_logged"), [(500, True), (4000, False)])
def test_a_long_way_without_a_state_that_fits_is_logged(caplog, place, is_logged):
    marks = Bookmarks([Bookmark(0, 0, 0, 0, place, {"place": place})])
    if is_logged:
        marks = Bookmarks()
    reader = StreamReader(Counting(5000), marks)
    assert reader.read(0, np.array([4000, 4001])) == [4000, 4001]
    expected = "Counting: 4000 samples are read and discarded to reach the first one of this process"
    assert [expected in record.message for record in caplog.records] == [True] * is_logged


def test_attributes_that_share_a_container_still_do():
    stream = Counting()
    stream.places = [{"place": 0}]
    stream.current = stream.places[0]
    copied = fresh_copy(stream)
    copied.current["place"] = 7
    assert (copied.places, stream.places) == ([{"place": 7}], [{"place": 0}])


class Around:
    """Reads other streams, and hands their states through, as a user's class does."""

    def __init__(self, *streams):
        self.streams = streams

    def __iter__(self):
        for stream in self.streams:
            yield from stream

    def state_dict(self):
        return {"states": [stream.state_dict() for stream in self.streams]}

    def load_state_dict(self, state):
        for stream, each in zip(self.streams, state["states"], strict=True):
            stream.load_state_dict(each)


@pytest.mark.parametrize("make", [lambda: Around(Counting()), lambda: Around(Around(Counting(20)), Counting(28, 20))])
def test_a_class_around_streams_loses_no_samples(make):
    straight, _ = read(make(), 15)
    assert straight[6] == straight[0] == list(range(8))
    for stop in (1, 4, 7):
        _, marks = read(make(), stop)
        stream = make()
        assert read(stream, 15 - stop, marks, start_step=stop)[0] == straight[stop:]
        # reading leaves the original alone
        assert read(stream, 2)[0] == straight[:2]


def test_the_newest_bookmark_of_each_stream_is_kept():
    old, new, other = Bookmark(0, 0, 0, 0, 4, "a"), Bookmark(0, 1, 1, 0, 2, "b"), Bookmark(3, 0, 0, 0, 1, "c")
    assert [mark.state for mark in Bookmarks([new, old, other])] == ["b", "c"]


def test_a_slow_state_is_asked_for_seldom(monkeypatch):
    monkeypatch.setattr(bookmark, "TIME_SHARE", 0.01)
    ticks = iter([0.0, 0.5, 1.0, 49.0, 51.0, 51.5])
    monkeypatch.setattr(bookmark.time, "perf_counter", lambda: next(ticks))
    clock, stream = StateClock(), Counting()
    assert [clock.take(stream) for _ in range(4)] == [{"place": 0}, None, None, {"place": 0}]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_stream_does_not_learn_of_loading_processes(num_workers):
    straight, _ = read(Split(), 3)
    found, _ = read(Split(), 3, num_workers=num_workers)
    assert found == straight == [list(range(8)), list(range(8, 16)), list(range(16, 24))]
    loader = EvalLoader(Split(), 2, rank=0, world_size=1, workers=Workers(num_workers))
    assert sorted(value for batch in loader.rounds() for value in (batch if batch is not None else ())) == list(
        range(48)
    )


def test_streams_share_each_step():
    """Three streams of other lengths: each has a third of a step, and starts over by itself."""

    def make():
        return ShardedStream([Counting(length, 10_000 * number) for number, length in enumerate((20, 7, 12))])

    plan = {size: BatchPlan(600, 12, 2 if size > 1 else 3, size, drop_last=False) for size in (1, 2, 3, 6)}
    straight, _ = read(make(), 6, plan=plan[1], world_size=1)
    assert straight[1] == [4, 5, 6, 7, 10004, 10005, 10006, 11000, 20004, 20005, 20006, 20007]
    for size in (2, 3, 6):
        assert read(make(), 6, plan=plan[size], world_size=size)[0] == straight
        for stop in (1, 3, 5):
            _, marks = read(make(), stop, plan=plan[size], world_size=size, num_workers=2 * (size == 2))
            for other in (1, 3):
                resumed, _ = read(make(), 6 - stop, marks, start_step=stop, plan=plan[other], world_size=other)
                assert resumed == straight[stop:]


def test_a_rank_opens_only_its_own_streams():
    streams = [Counting(first=100 * number) for number in range(4)]
    fetcher = BatchFetcher(ShardedStream(streams), 0, step_samples=8)
    loader = TrainLoader(fetcher, sequential, BatchPlan(80, 8, 4, 2, drop_last=False), rank=1)
    batches = iter(loader)
    next(batches)
    assert [len(stream.read) for stream in streams] == [0, 0, 2, 2]


def test_streams_that_cannot_share_a_step_are_refused():
    with pytest.raises(ConfigError, match=r"trainer\.global_batch_size=8: the 3 streams .* choose a multiple of 3"):
        read(ShardedStream([Counting()] * 3), 1)
    with pytest.raises(TaskError, match="needs one stream or more"):
        ShardedStream([])


def test_evaluation_reads_the_streams_one_after_the_other():
    loader = EvalLoader(ShardedStream([Counting(3), Counting(2, 100)]), 2, rank=0, world_size=1)
    for at_most in (1, None, None):  # each evaluation begins at the start, also after one that ended early
        found = [batch.tolist() for batch in loader.rounds(at_most) if batch is not None]
        assert found == [[0, 1], [2, 100], [101]][:at_most]


def test_a_shuffled_stream_continues_within_a_window():
    def make():
        return ShuffledStream(Counting(23), 10, seed=1)

    plan = {size: BatchPlan(460, 4, 2, size, drop_last=False) for size in (1, 2)}
    straight, _ = read(make(), 12, plan=plan[1], world_size=1)
    flat = [number for step in straight for number in step]
    first = [number for number in flat if number < 1000]
    assert sorted(first) == list(range(23))
    assert sorted(first[:8]) != list(range(8))
    assert {number for step in straight[:2] for number in step} < set(range(10))
    for stop in range(1, 12):
        _, marks = read(make(), stop, plan=plan[1], world_size=1)
        for size in (1, 2):
            resumed, _ = read(make(), 12 - stop, marks, start_step=stop, plan=plan[size], world_size=size)
            assert resumed == straight[stop:]
    other, _ = read(ShuffledStream(Counting(23), 10, seed=2), 12, plan=plan[1], world_size=1)
    assert other != straight


def test_a_stream_without_a_state_cannot_be_shuffled_exactly():
    with pytest.raises(TaskError, match="needs a stream with state_dict and load_state_dict, but Plain has none"):
        ShuffledStream(Plain(), 10, seed=0)
    with pytest.raises(TaskError, match="at least 1 sample, got 0"):
        ShuffledStream(Counting(), 0, seed=0)


def test_what_can_be_read_only_once_is_refused():
    with pytest.raises(TaskError, match="a generator can be read only once"):
        read((number for number in range(9)), 1)
    part = Counting()
    part._distributed = object()
    with pytest.raises(TaskError, match=r"only one rank's part .*split_dataset_by_node"):
        read(part, 1)


def test_what_a_resume_costs_is_said():
    assert describe_resume_cost(Counting()) is None
    assert "has no state, and can't seek: a resume reads it again" in describe_resume_cost(Plain())

    class BufferShuffledExamplesIterable(Counting):
        def __init__(self, buffer_size):
            super().__init__()
            self.buffer_size = buffer_size

    shuffled = Counting()
    shuffled._ex_iterable = Counting()
    shuffled._ex_iterable.ex_iterable = BufferShuffledExamplesIterable(1)
    assert has_bookmarks(shuffled)
    shuffled._ex_iterable.ex_iterable.buffer_size = 2
    assert "leaves out the samples in its shuffle buffer" in describe_resume_cost(shuffled)
    assert not has_bookmarks(shuffled)
    assert not has_bookmarks(Around(Around(shuffled)))
    # without bookmarks, the same samples by replaying
    straight, marks = read(shuffled, 3)
    assert list(marks) == []
    assert read(copy.copy(shuffled), 2, marks, start_step=1)[0] == straight[1:]

from __future__ import annotations

import copy
import multiprocessing
import weakref
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from hpctrain.data.bookmark import Bookmark, Bookmarks
from hpctrain.data.fetch import BatchFetcher, TensorBatches
from hpctrain.data.loader import TrainLoader
from hpctrain.data.micro_batch import MoveOnDemand, PendingCopies, one_ahead, transfer_batches
from hpctrain.data.order import ShuffledOrder
from hpctrain.data.plan import BatchPlan
from hpctrain.data.workers import Workers
from hpctrain.errors import TaskError

PLAN = BatchPlan(24, global_batch_size=8, micro_batch_size=2, world_size=2, drop_last=True)


class Recorder:
    """A transfer that records its calls, and marks the batches."""

    def __init__(self, *, allows_prefetch: bool = True) -> None:
        self.allows_prefetch = allows_prefetch
        self.calls: list[tuple[str, Any]] = []

    def begin(self, batch: Any) -> Any:
        self.calls.append(("begin", _plain(batch)))
        return "begun", batch

    def finish(self, begun: Any) -> Any:
        name, batch = begun
        assert name == "begun"
        self.calls.append(("finish", _plain(batch)))
        return "finished", batch


def _plain(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [_plain(item) for item in batch] if isinstance(batch, (list, tuple)) else batch


def failing(at: int, error: Exception) -> Iterator[int]:
    for number in count():
        if number == at:
            raise error
        yield number


def test_each_item_is_taken_before_its_predecessor_is_yielded() -> None:
    taken: list[int] = []
    early = one_ahead(taken.append(number) or number for number in range(4))
    assert taken == []
    for number in range(4):
        assert next(early) == number
        assert taken == list(range(min(number + 2, 4)))
    with pytest.raises(StopIteration):
        next(early)
    assert list(one_ahead(iter(()))) == []
    assert list(one_ahead(iter((1,)))) == [1]


@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_error_is_raised_in_the_place_of_its_item(at: int) -> None:
    early = one_ahead(failing(at, ValueError("broken")))
    assert list(islice(early, at)) == list(range(at))
    with pytest.raises(ValueError, match="broken"):
        next(early)


def test_an_error_of_an_item_that_is_never_asked_for_is_never_raised() -> None:
    early = one_ahead(failing(2, ValueError("broken")))
    assert [next(early), next(early)] == [0, 1]
    early.close()


def test_closing_closes_where_the_items_come_from() -> None:
    closed = []

    def items() -> Iterator[int]:
        try:
            yield from count()
        finally:
            closed.append(True)

    batches = transfer_batches(items(), Recorder(), prefetch_one=True)
    next(batches)
    assert not closed
    del batches
    assert closed == [True]


@pytest.mark.parametrize("prefetch_one", [True, False])
@pytest.mark.parametrize("allows_prefetch", [True, False])
def test_a_copy_begins_early_where_nothing_forbids_it(prefetch_one: bool, allows_prefetch: bool) -> None:
    recorder = Recorder(allows_prefetch=allows_prefetch)
    batches = transfer_batches(range(9), recorder, prefetch_one=prefetch_one)
    assert [next(batches), next(batches)] == [("finished", 0), ("finished", 1)]
    early = [("begin", 0), ("begin", 1), ("finish", 0), ("begin", 2), ("finish", 1)]
    late = [("begin", 0), ("finish", 0), ("begin", 1), ("finish", 1)]
    assert recorder.calls == (early if prefetch_one and allows_prefetch else late)


def test_a_tasks_own_method_is_called_when_its_batch_is_asked_for() -> None:
    device, calls = torch.device("cpu"), []
    move = MoveOnDemand(lambda batch, where: calls.append((batch, where)) or -batch, device)
    batches = transfer_batches(range(1, 9), move, prefetch_one=True)
    assert [next(batches), next(batches)] == [-1, -2]
    assert calls == [(1, device), (2, device)]


def test_a_tasks_method_that_raises_stop_iteration_does_not_end_the_batches() -> None:
    def move(batch: Any, device: torch.device) -> Any:
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        next(transfer_batches(range(9), MoveOnDemand(move, torch.device("cpu")), prefetch_one=False))


class Copying:
    """A stream: each copy is done once its event says so, and a lost GPU says nothing more."""

    def __init__(self) -> None:
        self.events: list[Copying.Event] = []

    class Event:
        def __init__(self) -> None:
            self.is_done = False
            self.is_lost = False

        def query(self) -> bool:
            if self.is_lost:
                raise RuntimeError("CUDA error")
            return self.is_done

    def record_event(self) -> Any:
        self.events.append(self.Event())
        return self.events[-1]


class Memory:
    """What a batch is in."""


def test_a_batch_is_kept_until_its_copy_is_done() -> None:
    stream, copied = Copying(), PendingCopies()
    alive = weakref.WeakSet[Memory]()

    def copy_one() -> None:
        batch = Memory()
        alive.add(batch)
        assert copied.add(batch, stream) is stream.events[-1]  # type: ignore[arg-type]  # as far as it is needed

    copy_one()
    copy_one()
    stream.events[1].is_done = True
    copy_one()
    assert len(alive) == 3
    stream.events[0].is_done = True
    copy_one()
    assert len(alive) == 2
    for event in stream.events:
        event.is_done = event.is_lost = True
    with pytest.raises(RuntimeError, match="CUDA error"):
        copy_one()
    assert len(alive) == 3


@pytest.mark.parametrize("prefetch_one", [True, False])
def test_what_arrived_is_given_back_before_more_is_copied(prefetch_one: bool) -> None:
    alive = weakref.WeakSet[Memory]()
    before = []

    class Arriving(Recorder):
        def begin(self, batch: Any) -> Any:
            before.append(len(alive))
            arrived = Memory()
            alive.add(arrived)
            return arrived

        def finish(self, begun: Any) -> Any:
            return "finished"

    for _ in transfer_batches(range(5), Arriving(), prefetch_one=prefetch_one):
        pass
    assert before == ([0, 1, 1, 1, 1] if prefetch_one else [0] * 5)


class Counted(IterableDataset[int]):
    """A stream with a state."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.read = 0

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        while self.read < self.num_samples:
            self.read += 1
            yield 1000 * self.epoch + self.read - 1

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: Any) -> None:
        self.read = state["read"]


def stream_loader(bookmarks: Bookmarks, *, rank: int, start_step: int = 0, num_workers: int = 0) -> TrainLoader:
    order, workers = lambda epochs, positions: positions + 0 * epochs, Workers(num_workers)
    fetcher = BatchFetcher(Counted(24), 0, bookmarks=bookmarks)
    return TrainLoader(fetcher, order, PLAN, rank=rank, start_step=start_step, workers=workers)


def by_position(bookmarks: Bookmarks) -> list[tuple[int, int]]:
    return [(bookmark.epoch, bookmark.position) for bookmark in bookmarks]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_no_bookmark_lies_behind_a_batch_that_is_not_given_out_yet(num_workers: int) -> None:
    """Its position is at most the first sample of the newest batch, in each rank, whatever was taken early."""
    for rank in (0, 1):
        bookmarks, recorder = Bookmarks(), Recorder()
        batches = stream_loader(bookmarks, rank=rank, num_workers=num_workers).micro_batches(recorder)
        found = 0
        for number, micro_batch in enumerate(islice(batches, 30), 1):
            epoch, first = (number - 1) // 6, int(micro_batch.indices[0])
            begun = sum(name == "begin" for name, _ in recorder.calls)
            assert begun == number + (num_workers > 0)
            for position in by_position(bookmarks):
                assert position <= (epoch, first)
                found += 1
        assert found
        batches.close()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("steps", [1, 2, 4, 7])
def test_a_resume_from_the_bookmarks_between_two_steps_loses_no_batch(num_workers: int, steps: int) -> None:
    def samples(loader: TrainLoader, number: int) -> list[Any]:
        batches = loader.micro_batches(Recorder())
        found = [each.batch[1].tolist() for each in islice(batches, number)]
        batches.close()
        return found

    straight = {rank: samples(stream_loader(Bookmarks(), rank=rank), 24) for rank in (0, 1)}
    saved: list[Bookmark] = []
    for rank in (0, 1):
        bookmarks = Bookmarks()
        loader = stream_loader(bookmarks, rank=rank, num_workers=num_workers)
        assert samples(loader, 2 * steps) == straight[rank][: 2 * steps]
        saved += bookmarks
    # each rank resumes with the newest bookmarks of all ranks
    for rank in (0, 1):
        loader = stream_loader(Bookmarks(copy.deepcopy(saved)), rank=rank, start_step=steps, num_workers=num_workers)
        assert samples(loader, 24 - 2 * steps) == straight[rank][2 * steps :]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_gives_the_same_micro_batches_whether_they_are_transferred_or_not(num_workers: int) -> None:
    dataset, order = TensorBatches(torch.arange(24)), ShuffledOrder(24, 3)
    loader = TrainLoader(BatchFetcher(dataset, 3), order, PLAN, rank=1, workers=Workers(num_workers))
    recorder = Recorder()
    here, moved = iter(loader), loader.micro_batches(recorder)
    for plain, other in islice(zip(here, moved, strict=True), 20):
        name, batch = other.batch
        assert name == "finished"
        assert torch.equal(batch[0], plain.batch[0])
        assert (plain.on_device, other.on_device) == (False, True)
        assert other[1:4] == plain[1:4]
        assert other.indices.tolist() == plain.indices.tolist()
    finished = [batch for name, batch in recorder.calls if name == "finish"]
    begun = [batch for name, batch in recorder.calls if name == "begin"]
    assert begun[:20] == finished
    assert len(begun) == 20 + (num_workers > 0)
    here.close()
    moved.close()
    assert not multiprocessing.active_children()


class BrokenLater(Dataset[int]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        if index >= 16:
            raise TaskError("broken")
        return index


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_data_comes_with_its_own_batch(num_workers: int) -> None:
    order, workers = lambda epochs, positions: positions + 0 * epochs, Workers(num_workers)
    loader = TrainLoader(BatchFetcher(BrokenLater(), 0), order, PLAN, rank=0, workers=workers)
    batches = loader.micro_batches(Recorder())
    assert len(list(islice(batches, 4))) == 4
    with pytest.raises(TaskError, match="broken"):
        next(batches)

"""With Hugging Face's datasets itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpctrain.data import bookmark
from hpctrain.data.fetch import BatchFetcher, dataset_length, workers_can_help
from hpctrain.data.order import ShuffledOrder
from hpctrain.data.plan import BatchPlan
from hpctrain.data.stream import ShardedStream, ShuffledStream, has_bookmarks
from hpctrain.errors import TaskError
from tests.unit.stream_steps import read_steps

pytestmark = pytest.mark.nightly
STEPS = 10


def table(first=0, length=48):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"number": list(range(first, first + length))})


def stream(first=0, length=48, shards=4):
    return table(first, length).to_iterable_dataset(num_shards=shards)


def rows(count):
    return lambda found: {"number": [number for number in found["number"] for _ in range(count)]}


def mixed():
    datasets = pytest.importorskip("datasets")
    parts = [stream(), stream(1000, 20, 2)]
    return datasets.interleave_datasets(parts, probabilities=[0.7, 0.3], seed=3, stopping_strategy="all_exhausted")


def joined():
    return pytest.importorskip("datasets").concatenate_datasets([stream(), stream(1000, 13, 1)])


def generated():
    def numbers(shards):
        for shard in shards:
            yield from ({"number": 100 * shard + place} for place in range(10))

    return pytest.importorskip("datasets").IterableDataset.from_generator(numbers, gen_kwargs={"shards": [0, 1, 2, 3]})


class Around:
    """What a user writes around a stream."""

    def __init__(self):
        self.inner = stream()

    def __iter__(self):
        for row in self.inner:
            yield {"number": row["number"] * 2}

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)


STREAMS = {
    "plain": stream,
    "tensors": lambda: stream().with_format("torch"),
    "mapped": lambda: stream().map(lambda row: {"number": row["number"] * 2}),
    "multiplied": lambda: stream().map(rows(2), batched=True, batch_size=5),
    "mapped tensors": lambda: stream().map(lambda found: found, batched=True, batch_size=5).with_format("torch"),
    "filtered": lambda: stream().filter(lambda row: row["number"] % 3),
    "tables": lambda: stream().with_format("arrow").map(lambda found: found, batched=True, batch_size=7),
    "shuffled files": lambda: stream().shuffle(seed=1, buffer_size=1),
    "shuffled windows": lambda: ShuffledStream(stream(), 7, seed=1),
    "buffer": lambda: stream().shuffle(seed=1, buffer_size=10),
    "mixed": mixed,
    "joined": joined,
    "part": lambda: stream().skip(3).take(30),
    "generated": generated,
    "around": Around,
    "sharded": lambda: ShardedStream([stream(shards=8).shard(4, number) for number in range(4)]),
}


@pytest.fixture(autouse=True)
def a_bookmark_with_every_batch(monkeypatch):
    monkeypatch.setattr(bookmark, "TIME_SHARE", 1e9)


def numbers_of(samples):
    if not isinstance(samples[0], dict):  # of pyarrow
        samples = [{"number": sample["number"][0].as_py()} for sample in samples]
    return [int(sample["number"]) for sample in samples]


def read(data, steps, marks=(), *, world_size=1, length=480, **options):
    plan = BatchPlan(length, 8, 2, world_size, drop_last=False)
    return read_steps(lambda: data, plan, steps, marks, collate_fn=numbers_of, **options)


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_continues_at_any_step_and_world_size(name):
    make = STREAMS[name]
    straight, _ = read(make(), STEPS)
    for stop in range(1, STEPS):
        _, marks = read(make(), stop, num_workers=2 * (stop % 4 == 0))
        assert bool(list(marks)) is (name != "buffer")
        for world_size, num_workers in [(1, 0), (2, 2 * (stop % 4 == 1)), (4, 0)]:
            resumed, _ = read(
                make(), STEPS - stop, marks, start_step=stop, world_size=world_size, num_workers=num_workers
            )
            assert resumed == straight[stop:]


def test_what_is_lost_without_bookmarks_is_known():
    assert not has_bookmarks(STREAMS["buffer"]())
    assert has_bookmarks(STREAMS["shuffled files"]())
    with pytest.raises(TaskError, match="it has a shuffle buffer, which its state leaves out"):
        ShuffledStream(STREAMS["buffer"](), 10, seed=0)


def test_one_ranks_part_of_a_stream_is_refused():
    from datasets.distributed import split_dataset_by_node

    with pytest.raises(TaskError, match=r"this IterableDataset is only one rank's part .*split_dataset_by_node"):
        read(split_dataset_by_node(stream(), rank=0, world_size=2), 1)


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 2), (2, 0), (4, 2)])
def test_a_table_is_read_by_index(world_size, num_workers):
    data, order = table(), ShuffledOrder(48, 0)
    straight, _ = read(data, 12, order=order, length=48)
    assert sorted(number for step in straight[:6] for number in step) == list(range(48))
    options = {"world_size": world_size, "num_workers": num_workers, "order": order, "length": 48}
    assert read(data, 12, **options)[0] == straight
    assert read(data, 5, start_step=7, **options)[0] == straight[7:]


def test_a_table_is_read_in_batches_of_tensors():
    data = table().with_format("torch").map(lambda row: {"pair": [row["number"], 1]})
    assert workers_can_help(data)
    batch = BatchFetcher(data, 0)[0, np.array([5, 3])]
    assert batch["number"].tolist() == [5, 3]
    assert batch["pair"].tolist() == [[5, 1], [3, 1]]


def test_a_transform_draws_the_same_numbers_at_any_world_size_if_it_says_that_it_draws():
    def noisy(found):
        return {"number": [torch.randint(0, 1000, ()).item() for _ in found["number"]]}

    def draws(world_size):
        data = table().with_transform(noisy)
        data.draws_per_sample = True
        return read(data, 6, world_size=world_size, order=ShuffledOrder(48, 0), length=48)[0]

    assert draws(1) == draws(2)


def test_a_dict_of_datasets_is_refused():
    datasets = pytest.importorskip("datasets")
    both = datasets.DatasetDict({"train": table(), "test": table()})
    with pytest.raises(TaskError, match="expected one dataset, but this DatasetDict has 'train', 'test': return one"):
        dataset_length(both)

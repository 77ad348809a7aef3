"""Fetch a batch by its sample indices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from hpctrain.data.bookmark import Bookmarks, Marked
from hpctrain.data.dataset import BatchDataset, TensorBatches
from hpctrain.data.keyed_random import IntArray, keyed_bits, lent_generators, seed_generators
from hpctrain.data.micro_batch import samples_in
from hpctrain.data.stream import ShardedReader, ShardedStream, StreamReader, is_stream
from hpctrain.errors import TaskError
from hpctrain.phrases import listed

Collate: TypeAlias = Callable[[list[Any]], Any]
Request: TypeAlias = tuple[int, IntArray]  # epoch, sample indices

_SALT = 0x73616D706C65  # "sample": keeps these bits apart from others drawn from the same seed


class CollatedBatch(NamedTuple):
    """A batch from the task's own `collate_fn`.

    Attributes:
        batch: the collated samples.
        num_samples: in it (`samples_in`).
    """

    batch: Any
    num_samples: int


class BatchFetcher(Dataset[Any]):
    """Fetches micro-batches from a dataset by the fastest protocol that it has (`BatchDataset` lists them).

    To PyTorch's `DataLoader` it is a dataset whose index is a pair (epoch, indices) and whose item is a batch.

    Args:
        dataset: with `__len__` and `__getitem__`, or iterable (see `SeekableStream`).
        seed: of the run; with epoch and index, the key of a sample's random draws.
        collate_fn: makes a batch of a list of samples; PyTorch's default collation if None.
        bookmarks: from which streams with a state continue; None: no batch comes with bookmarks.
        step_samples: samples per step, over all ranks, for a `ShardedStream`.
        counts: whether to return the result of ``collate_fn`` as `CollatedBatch`; without a ``collate_fn``, whether to
            refuse a dataset that returns fewer samples than were asked for.

    Attributes:
        num_samples: of the dataset; None for a stream without a length.
        streams: whether it reads streams.
        has_bookmarks: whether each batch comes in a pair with bookmarks.

    Raises:
        TaskError: the dataset is neither of them.
        ConfigError: the streams of a `ShardedStream` can't share a step.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        seed: int,
        collate_fn: Collate | None = None,
        *,
        bookmarks: Bookmarks | None = None,
        step_samples: int | None = None,
        counts: bool = False,
    ) -> None:
        self.num_samples = dataset_length(dataset)
        self.streams = is_stream(dataset)
        self.has_bookmarks = False
        self._dataset: Any = dataset
        self._seed = seed
        self._collate = collate_fn or default_collate
        self._requires_all = counts and collate_fn is None
        if counts and collate_fn is not None:
            self._collate = partial(_collated, collate_fn)
        self._reader: StreamReader | ShardedReader
        if self.streams:
            self._open_stream(bookmarks, step_samples)
        self._fetch = self._choose()

    def __getitem__(self, request: Request) -> Any:
        try:
            return self._fetch(request)
        except StopIteration as error:
            # whatever iterates over the batches would take it for their end
            raise TaskError(
                f"{type(self._dataset).__name__} raised StopIteration for samples of epoch {request[0]}: a sample is "
                "missing, or next() was called on an iterator that has ended"
            ) from error

    def _choose(self) -> Callable[[Request], Any]:
        if type(self._dataset) is TensorDataset and self._collate is default_collate:
            self._dataset = TensorBatches(*self._dataset.tensors)
        if self.streams:
            return self._streamed_with_bookmarks if self.has_bookmarks else self._streamed
        # every Subset has __getitems__, so the dataset inside it decides
        inner = without_subsets(self._dataset)
        known = isinstance(inner, (BatchDataset, TensorDataset))  # these draw nothing unless their attribute says so
        draws = getattr(inner, "draws_per_sample", False if known else None)
        if draws or (draws is None and not hasattr(inner, "__getitems__")):
            return self._one_by_one
        if isinstance(self._dataset, BatchDataset):
            return self._whole
        return self._listed_with_draws if draws is None else self._listed

    def _open_stream(self, bookmarks: Bookmarks | None, step_samples: int | None) -> None:
        if isinstance(self._dataset, ShardedStream) and step_samples is not None:
            self._reader = ShardedReader(self._dataset, step_samples, bookmarks)
        else:
            self._reader = StreamReader(self._dataset, bookmarks)
        self.has_bookmarks = bookmarks is not None and self._reader.has_bookmarks

    def _streamed_with_bookmarks(self, request: Request) -> Marked:
        before = self._reader.bookmark()
        return self._streamed(request), before

    def _streamed(self, request: Request) -> Any:
        return self._collate(self._reader.read(*request))

    def _whole(self, request: Request) -> Any:
        return self._dataset.get_batch(torch.from_numpy(request[1]))

    def _listed(self, request: Request) -> Any:
        indices = request[1].tolist()
        if hasattr(self._dataset, "__getitems__"):
            samples = self._dataset.__getitems__(indices)
            if self._requires_all and len(samples) != len(indices):
                raise TaskError(
                    f"{type(self._dataset).__name__}.__getitems__ returned {len(samples)} samples for {len(indices)} "
                    "indices: return one for each, or leave samples out in collate_fn instead"
                )
            return self._collate(samples)
        return self._collate([self._dataset[index] for index in indices])

    def _listed_with_draws(self, request: Request) -> Any:
        epoch, indices = request
        # once per call: the samples are fetched together, so no single one can be seeded
        with lent_generators():
            seed_generators(int(keyed_bits(self._seed, _SALT, epoch, indices[:1])[0]))
            return self._listed(request)

    def _one_by_one(self, request: Request) -> Any:
        epoch, indices = request
        keys = keyed_bits(self._seed, _SALT, epoch, indices)
        samples = []
        with lent_generators():
            for index, key in zip(indices.tolist(), keys.tolist(), strict=True):
                seed_generators(key)
                samples.append(self._dataset[index])
            return self._collate(samples)


class UpToEnd(NamedTuple):
    """A batch that may be cut short by the end of an epoch.

    Attributes:
        batch: the collated samples; None after the end.
        num_samples: of the epoch; None if its end wasn't reached.
    """

    batch: Any
    num_samples: int | None


class EpochFetcher(BatchFetcher):
    """Fetches micro-batches of one epoch of an iterable dataset, which may end anywhere.

    Args:
        dataset: iterable.
        collate_fn: makes a batch of a list of samples; PyTorch's default collation if None.
    """

    def __init__(self, dataset: Dataset[Any], collate_fn: Collate | None = None) -> None:
        super().__init__(dataset, 0, collate_fn)

    def __getitem__(self, request: Request) -> UpToEnd:
        assert isinstance(self._reader, StreamReader)
        samples = self._reader.read_once(*request)
        return UpToEnd(self._collate(samples) if samples else None, self._reader.num_samples)


def _collated(collate_fn: Collate, samples: list[Any]) -> CollatedBatch:
    given = list(samples)  # collate_fn may change the list
    batch = collate_fn(samples)
    identities = {id(sample) for sample in given}
    if isinstance(batch, (tuple, list)) and all(id(sample) in identities for sample in batch):
        return CollatedBatch(batch, len(batch))
    # those that are None don't count: collate functions leave them out
    return CollatedBatch(batch, samples_in(batch, len(given), sum(sample is not None for sample in given)))


def without_subsets(dataset: Any) -> Any:
    """The dataset that a `Subset`, or a subset of one, was taken from."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def dataset_length(dataset: Dataset[Any]) -> int | None:
    """Samples in an epoch; None for an iterable dataset without a length.

    Raises:
        TaskError: the dataset is neither iterable nor has `__len__` and `__getitem__`, or it is a loader, or several
            datasets.
    """
    if isinstance(dataset, Mapping):
        names = listed([repr(name) for name in dataset])
        raise TaskError(f"expected one dataset, but this {type(dataset).__name__} has {names}: return one of them")
    if isinstance(dataset, DataLoader):
        raise TaskError(
            f"expected a dataset, got a {type(dataset).__name__}: return its dataset; hpctrain makes the batches "
            "(trainer.global_batch_size, data.num_workers, Task.collate_fn, Task.order)"
        )
    if is_stream(dataset):
        try:
            return len(dataset)  # type: ignore[arg-type]  # Dataset declares no __len__
        except TypeError:
            return None
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TaskError(f"{type(dataset).__name__} can't be used as a dataset: expected __len__ and __getitem__")
    return len(dataset)

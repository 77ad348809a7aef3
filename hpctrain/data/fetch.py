"""Fetch a batch by its sample indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from hpctrain.data.dataset import BatchDataset
from hpctrain.data.keyed_random import IntArray, keyed_bits, lent_generators, seed_generators
from hpctrain.data.stream import StreamReader
from hpctrain.data.tensors import TensorBatches
from hpctrain.errors import TaskError

Collate: TypeAlias = Callable[[list[Any]], Any]
Request: TypeAlias = tuple[int, IntArray]  # epoch, sample indices

_SALT = 0x73616D706C65  # "sample": keeps these bits apart from others drawn from the same seed


class BatchFetcher(Dataset[Any]):
    """Fetches micro-batches from a dataset by the fastest protocol that it has (`BatchDataset` lists them).

    To PyTorch's `DataLoader` it is a dataset whose index is a pair (epoch, indices) and whose item is a batch.

    Args:
        dataset: with `__len__` and `__getitem__`, or iterable (see `SeekableStream`).
        seed: of the run; with epoch and index, the key of a sample's random draws.
        collate_fn: makes a batch of a list of samples; PyTorch's default collation if None.

    Raises:
        TaskError: the dataset is neither of them.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, collate_fn: Collate | None = None) -> None:
        self.num_samples = dataset_length(dataset)
        self._dataset: Any = dataset
        self._seed = seed
        self._collate = collate_fn or default_collate
        self._fetch = self._choose()

    def __getitem__(self, request: Request) -> Any:
        return self._fetch(request)

    def _choose(self) -> Callable[[Request], Any]:
        if type(self._dataset) is TensorDataset and self._collate is default_collate:
            self._dataset = TensorBatches(*self._dataset.tensors)
        if isinstance(self._dataset, IterableDataset):
            self._reader = StreamReader(self._dataset)
            return self._streamed
        # every Subset has __getitems__, so the dataset inside it decides
        inner = without_subsets(self._dataset)
        known = isinstance(inner, (BatchDataset, TensorDataset))  # these draw nothing unless their attribute says so
        draws = getattr(inner, "draws_per_sample", False if known else None)
        if draws or (draws is None and not hasattr(inner, "__getitems__")):
            return self._one_by_one
        if isinstance(self._dataset, BatchDataset):
            return self._whole
        return self._listed_with_draws if draws is None else self._listed

    def _streamed(self, request: Request) -> Any:
        return self._collate(self._reader.read(*request))

    def _whole(self, request: Request) -> Any:
        return self._dataset.get_batch(torch.from_numpy(request[1]))

    def _listed(self, request: Request) -> Any:
        indices = request[1].tolist()
        if hasattr(self._dataset, "__getitems__"):
            return self._collate(self._dataset.__getitems__(indices))
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

    def __init__(self, dataset: IterableDataset[Any], collate_fn: Collate | None = None) -> None:
        super().__init__(dataset, 0, collate_fn)

    def __getitem__(self, request: Request) -> UpToEnd:
        samples = self._reader.read_once(*request)
        return UpToEnd(self._collate(samples) if samples else None, self._reader.num_samples)


def without_subsets(dataset: Any) -> Any:
    """The dataset that a `Subset`, or a subset of one, was taken from."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def dataset_length(dataset: Dataset[Any]) -> int | None:
    """Samples in an epoch; None for an iterable dataset without a length.

    Raises:
        TaskError: the dataset is neither iterable nor has `__len__` and `__getitem__`.
    """
    if isinstance(dataset, IterableDataset):
        try:
            return len(dataset)  # type: ignore[arg-type]  # IterableDataset declares no __len__
        except TypeError:
            return None
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TaskError(f"{type(dataset).__name__} can't be used as a dataset: expected __len__ and __getitem__")
    return len(dataset)

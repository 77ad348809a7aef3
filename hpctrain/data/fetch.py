"""Fetch batches from a dataset by sample indices, in this process or in DataLoader workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from hpctrain.data.bookmark import Bookmarks, MarkedBatch
from hpctrain.data.keyed_random import IntArray, keyed_bits, lent_generators, seed_generators
from hpctrain.data.micro_batch import count_samples
from hpctrain.data.stream import ShardedReader, ShardedStream, StreamReader, is_stream
from hpctrain.data.workers import BatchToPin, Workers, load_in_workers
from hpctrain.errors import TaskError
from hpctrain.phrases import listed
from hpctrain.rank.agreement import LoadingStop

Collate: TypeAlias = Callable[[list[Any]], Any]
Request: TypeAlias = tuple[int, IntArray]  # epoch, sample indices

MAX_WORKERS = 8
"""Most workers by default: more rarely feed a rank faster, and each takes memory."""
CPU_SHARE = 4
"""Cores per worker on a CPU: the other cores compute."""
_SALT = 0x73616D706C65  # "sample": keeps these bits apart from others drawn from the same seed


@runtime_checkable
class BatchDataset(Protocol):
    """A dataset that returns many samples at once, already collated; for data in memory.

    No base class is needed: any `torch.utils.data.Dataset` with these methods conforms.

    The loader uses the first of these protocols that a dataset has:

    1. `get_batch(indices)`, this protocol: one call per micro-batch, no collation, no seeding;
    2. `__getitems__(indices)`, PyTorch's own: one call per micro-batch returns the list of samples, which are collated;
    3. `__getitem__(index)`: one call per sample.

    The attribute `draws_per_sample` is true if the samples use the global generators of `random`, NumPy and PyTorch,
    such as for augmentation. True: samples come one by one through `__getitem__`, and before each the generators are
    seeded from (seed, epoch, index), so that the draws are the same at any world size and with any number of workers.
    False: nothing is seeded. Without the attribute it is True for 3 and False for 1; for 2 the generators are seeded
    once per micro-batch, which is exact for a resume, but not across world sizes.

    Example:
        A table in memory, from which a batch is one indexing operation::

            class Table(torch.utils.data.Dataset):
                def __init__(self, rows, targets):
                    self.rows, self.targets = rows, targets

                def __len__(self):
                    return len(self.rows)

                def __getitem__(self, index):
                    return self.rows[index], self.targets[index]

                def get_batch(self, indices):
                    return self.rows[indices], self.targets[indices]
    """

    def __len__(self) -> int:
        """Number of samples."""

    def get_batch(self, indices: Tensor) -> Any:
        """The samples at these indices, stacked.

        Args:
            indices: int64 of shape [n], on the CPU, n >= 1; may repeat.

        Returns:
            The batch for the task's `loss` and `evaluate`, on the CPU.
        """


class TensorBatches(Dataset[Any]):
    """A dataset whose samples are the rows of tensors; a batch costs one `index_select` per tensor.

    Args:
        tensors: at least one, each of shape [num_samples, ...].

    Raises:
        TaskError: no tensor was given, or their lengths differ.

    Example:
        Ten samples of three features and a label each::

            TensorBatches(torch.randn(10, 3), torch.arange(10))
    """

    def __init__(self, *tensors: Tensor) -> None:
        lengths = [len(tensor) for tensor in tensors]
        if len(set(lengths)) != 1:
            raise TaskError(f"TensorBatches needs one tensor or more of equal lengths, got lengths {lengths}")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def get_batch(self, indices: Tensor) -> tuple[Tensor, ...]:
        """See `BatchDataset`."""
        # a list, since a generator takes longer than the rest of this line
        return tuple([torch.index_select(tensor, 0, indices) for tensor in self.tensors])


class CollatedBatch(NamedTuple):
    """A batch from the task's own `collate_fn`.

    Attributes:
        batch: the collated samples.
        num_samples: in it (`count_samples`).
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
        bookmarks: from which streams with a state continue; None: read from the start.
        step_samples: samples per step, over all ranks, for a `ShardedStream`.
        counts: whether to return the result of ``collate_fn`` as `CollatedBatch`; without a ``collate_fn``, whether to
            refuse a dataset that returns fewer samples than were asked for.

    Attributes:
        num_samples: of the dataset; None for a stream without a length.
        streams: whether it reads streams.
        bookmarks: as given, if each batch comes in a pair with newer ones (`MarkedBatch`); None if it doesn't.

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
        self.bookmarks: Bookmarks | None = None
        self._dataset: Any = dataset
        self._seed = seed
        self._collate = collate_fn or default_collate
        self._requires_all = counts and collate_fn is None
        if counts and collate_fn is not None:
            self._collate = partial(_collate_and_count, collate_fn)
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
            return self._fetch_from_stream if self.bookmarks is None else self._fetch_with_bookmarks
        # every Subset has __getitems__, so the dataset inside it decides
        inner = without_subsets(self._dataset)
        draws_nothing = isinstance(
            inner, (BatchDataset, TensorDataset)
        )  # these draw nothing unless their attribute says so
        draws = getattr(inner, "draws_per_sample", False if draws_nothing else None)
        if draws or (draws is None and not hasattr(inner, "__getitems__")):
            return self._fetch_one_by_one
        if isinstance(self._dataset, BatchDataset):
            return self._fetch_whole_batch
        return self._fetch_list_with_draws if draws is None else self._fetch_list

    def _open_stream(self, bookmarks: Bookmarks | None, step_samples: int | None) -> None:
        if isinstance(self._dataset, ShardedStream) and step_samples is not None:
            self._reader = ShardedReader(self._dataset, step_samples, bookmarks)
        else:
            self._reader = StreamReader(self._dataset, bookmarks)
        self.bookmarks = bookmarks if self._reader.has_bookmarks else None

    def _fetch_with_bookmarks(self, request: Request) -> MarkedBatch:
        before = self._reader.bookmark()
        return self._fetch_from_stream(request), before

    def _fetch_from_stream(self, request: Request) -> Any:
        return self._collate(self._reader.read(*request))

    def _fetch_whole_batch(self, request: Request) -> Any:
        return self._dataset.get_batch(torch.from_numpy(request[1]))

    def _fetch_list(self, request: Request) -> Any:
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

    def _fetch_list_with_draws(self, request: Request) -> Any:
        epoch, indices = request
        # once per call: the samples are fetched together, so no single one can be seeded
        with lent_generators():
            seed_generators(int(keyed_bits(self._seed, _SALT, epoch, indices[:1])[0]))
            return self._fetch_list(request)

    def _fetch_one_by_one(self, request: Request) -> Any:
        epoch, indices = request
        keys = keyed_bits(self._seed, _SALT, epoch, indices)
        samples = []
        with lent_generators():
            for index, key in zip(indices.tolist(), keys.tolist(), strict=True):
                seed_generators(key)
                samples.append(self._dataset[index])
            return self._collate(samples)


class EpochBatch(NamedTuple):
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

    def __getitem__(self, request: Request) -> EpochBatch:
        assert isinstance(self._reader, StreamReader)
        samples = self._reader.read_once(*request)
        return EpochBatch(self._collate(samples) if samples else None, self._reader.num_samples)


def _collate_and_count(collate_fn: Collate, samples: list[Any]) -> CollatedBatch:
    originals = list(samples)  # collate_fn may change the list
    batch = collate_fn(samples)
    identities = {id(sample) for sample in originals}
    if isinstance(batch, (tuple, list)) and all(id(sample) in identities for sample in batch):
        return CollatedBatch(batch, len(batch))
    # those that are None don't count: collate functions leave them out
    return CollatedBatch(batch, count_samples(batch, len(originals), sum(sample is not None for sample in originals)))


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


def default_num_workers(dataset: Dataset[Any], cores: int, *, on_gpu: bool) -> int:
    """Default number of DataLoader workers.

    Args:
        dataset: of the task.
        cores: the rank's share of the CPU cores.
        on_gpu: whether the rank computes on a GPU; one core drives it.
    """
    if not workers_can_help(dataset):
        return 0
    return min(MAX_WORKERS, cores - 1 if on_gpu else cores // CPU_SHARE)


def workers_can_help(dataset: Dataset[Any]) -> bool:
    """Return whether DataLoader workers can fetch the samples faster than the rank itself.

    They can't if whole batches come from memory, since sending one takes longer than making it. Nor can they for a
    stream, since each worker would read all of it.
    """
    inner: Any = without_subsets(dataset)
    in_batches = isinstance(inner, BatchDataset | TensorDataset) and not getattr(inner, "draws_per_sample", False)
    return not in_batches and not is_stream(inner)


def fetch_batches(
    fetcher: BatchFetcher, requests: Iterable[Request], workers: Workers, loading: LoadingStop | None = None
) -> Iterator[Any]:
    """Yield batches in the order of the requests; the workers end when the iterator is dropped.

    Draws nothing from this process's random generators.

    Args:
        fetcher: turns a request (epoch, indices) into a batch.
        requests: may be endless.
        workers: how batches are fetched.
        loading: stops the ranks while they wait for a batch; None: nothing stops them.

    Raises:
        StopWhileLoading: the ranks stop.
        HpctrainError: a worker can't send its batches to this process.
        TaskError: a batch can't be sent, because Python can't pickle it.
    """
    pin_memory = workers.pin_memory and torch.cuda.is_available()
    if not workers.num_workers:
        return _fetch_here(fetcher, requests, loading, pin_memory=pin_memory)
    return load_in_workers(fetcher, requests, workers, loading, pin_memory=pin_memory)


def _fetch_here(
    fetcher: BatchFetcher, requests: Iterable[Request], loading: LoadingStop | None, *, pin_memory: bool
) -> Iterator[Any]:
    for request in requests:
        if loading is not None and loading.interrupts:
            batch = loading.fetch(fetcher.__getitem__, request)
        else:
            batch = fetcher[request]
        yield BatchToPin(batch).pin_memory() if pin_memory else batch

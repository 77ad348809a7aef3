"""Several streams that are read side by side, so that no rank has to read all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch.utils.data import IterableDataset

from hpctrain.data.bookmark import Bookmark, Bookmarks
from hpctrain.data.keyed_random import IntArray
from hpctrain.data.stream import StreamReader, is_stream
from hpctrain.errors import ConfigError, TaskError


class ShardedStream(IterableDataset[Any]):
    """Several streams as one: each provides an equal share of every step.

    A step of G samples takes G / n from each of the n streams: positions [i * G / n, (i + 1) * G / n) from stream i.
    So the samples of a step are the same at any world size. A rank opens only the streams from which its samples come;
    several ranks may read the same stream. If n is a multiple of the number of ranks times the
    accumulation, each stream is read by one rank alone.

    A stream that ends starts over by itself, so that the epochs of the streams drift apart if their lengths differ. The
    whole has no length: the run needs trainer.max_steps.

    In evaluation the streams are read one after the other, by every rank.

    Args:
        streams: each an iterable dataset as a task may return it: best with `state_dict` or `read_from`. Their number
            must divide trainer.global_batch_size.

    Raises:
        TaskError: there is no stream.

    Example:
        A stream of Hugging Face, for up to eight ranks::

            dataset = datasets.load_dataset("allenai/c4", "en", split="train", streaming=True)
            ShardedStream([dataset.shard(num_shards=8, index=number) for number in range(8)])
    """

    def __init__(self, streams: Sequence[Any]) -> None:
        if not streams:
            raise TaskError("ShardedStream needs one stream or more, got none")
        self.streams = tuple(streams)

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.streams)


def streams_of(dataset: Any) -> tuple[Any, ...]:
    """The streams that a dataset consists of; none if it has an index."""
    if isinstance(dataset, ShardedStream):
        return dataset.streams
    return (dataset,) if is_stream(dataset) else ()


class ShardedReader:
    """Reads samples at increasing positions of a `ShardedStream`.

    Args:
        sharded: the streams.
        step_samples: samples per step, over all ranks.
        bookmarks: from which streams with a state may continue.

    Attributes:
        has_bookmarks: whether any of the streams has them.

    Raises:
        ConfigError: the number of streams doesn't divide that of the samples.
    """

    def __init__(self, sharded: ShardedStream, step_samples: int, bookmarks: Bookmarks | None = None) -> None:
        streams = sharded.streams
        if step_samples % len(streams):
            raise ConfigError(
                "trainer.global_batch_size",
                step_samples,
                f"the {len(streams)} streams of the ShardedStream can't have equal shares of it",
                f"choose a multiple of {len(streams)}, or another number of streams",
            )
        self._step_samples = step_samples
        self._share = step_samples // len(streams)
        self._readers = [StreamReader(stream, bookmarks, number) for number, stream in enumerate(streams)]
        self._used: set[int] = set()
        self.has_bookmarks = any(reader.has_bookmarks for reader in self._readers)

    def read(self, epoch: int, positions: IntArray) -> list[Any]:
        """The samples at these positions, int64 of shape [n].

        Raises:
            TaskError: a stream has no samples.
        """
        steps, places = divmod(positions, self._step_samples)
        numbers, offsets = divmod(places, self._share)
        own = steps * self._share + offsets
        samples = []
        for number, place in zip(numbers.tolist(), own, strict=True):
            self._used.add(number)
            samples += self._readers[number].read(epoch, place.reshape(1))
        return samples

    def bookmark(self) -> tuple[Bookmark, ...]:
        """Those of the streams that were read since the last call."""
        used = sorted(self._used)
        self._used.clear()
        return tuple(mark for number in used for mark in self._readers[number].bookmark())

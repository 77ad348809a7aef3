"""Iterable datasets, read by position like every other dataset: by seeking, by replaying, side by side or shuffled.

Neither webdataset nor torchdata is used: webdataset doesn't resume exactly, and torchdata 0.11 lost samples if a run
resumed with another number of ranks, and gave an empty epoch after a save at its end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch.utils.data import IterableDataset

from hpctrain.data.bookmark import Bookmark, Bookmarks, StateClock, StatefulStream, fresh_copy, loses_samples
from hpctrain.data.keyed_random import IntArray, keyed_bits
from hpctrain.errors import ConfigError, TaskError

log = logging.getLogger("hpctrain.data")

TOLERATED_REPLAY = 1000
"""Number of samples to read and discard without a warning."""


@runtime_checkable
class SeekableStream(Protocol):
    """An iterable dataset that can start anywhere, so that a resume costs nothing.

    Every rank and every DataLoader worker reads the same stream and takes its own positions of it: an implementation
    must not split itself among ranks or workers. With `__len__`, that many samples are an epoch; without it, the run is
    one epoch for the schedule and the log, and needs trainer.max_steps; where the stream ends, its next epoch begins.
    """

    def read_from(self, epoch: int, position: int) -> Iterator[Any]:
        """Iterate over an epoch's samples from a position on, both counted from 0; the same samples on every call.

        Yields nothing if the position is past the end of the epoch.
        """


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is read in its own order: it can be iterated over, but has no index."""
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )


def check_stream(stream: Any) -> None:
    """Check that a stream can be read several times, and isn't a part that only one rank reads.

    Raises:
        TaskError: it can't, or is.
    """
    name = type(stream).__name__
    if isinstance(stream, Iterator):
        raise TaskError(
            f"a {name} can be read only once, but each epoch and each resume reads the data again: wrap it in an "
            "IterableDataset whose __iter__ makes a new one"
        )
    if getattr(stream, "_distributed", None) is not None:
        raise TaskError(
            f"this {name} is only one rank's part of a dataset (split_dataset_by_node): return the whole dataset, "
            "which the ranks share, or ShardedStream([dataset.shard(n, i) for i in range(n)])"
        )


def has_bookmarks(stream: Any) -> bool:
    """Whether a stream has a state from which a resume can continue, and needs it."""
    return isinstance(stream, StatefulStream) and not isinstance(stream, SeekableStream) and not loses_samples(stream)


def describe_resume_cost(stream: Any) -> str | None:
    """Describe in a line the cost of a resume with this stream; None if it costs nothing worth mentioning."""
    if isinstance(stream, SeekableStream) or has_bookmarks(stream):
        return None
    name = type(stream).__name__
    how = "a resume reads it again from its start, and discards what was trained on"
    if isinstance(stream, StatefulStream):
        return (
            f"the state of this {name} leaves out the samples in its shuffle buffer: {how}; use ShuffledStream instead"
        )
    return f"{name} has no state, and can't seek: {how}; define read_from, or state_dict and load_state_dict"


@dataclass(slots=True)
class StreamPass:
    """One iteration over a stream, from its beginning or from a later position on.

    Attributes:
        number: the stream's own epoch: later than the run's, after an early end.
        begin: position in the run's epoch at which the pass begins.
        next: position of the next sample.
        stream: the object that is iterated over.
        samples: the rest.
        any_read: whether a sample was read since the pass was opened.
    """

    number: int
    begin: int
    next: int
    stream: Any
    samples: Iterator[Any]
    any_read: bool = False

    def read_to(self, position: int) -> tuple[Any] | None:
        """The sample at a position, in a tuple; None if the pass ends before it."""
        for sample in self.samples:
            self.any_read = True
            self.next += 1
            if self.next > position:
                return (sample,)
        return None


class StreamReader:
    """Reads samples at increasing positions of a stream, and skips those in between, which belong to other ranks.

    Args:
        stream: an iterable dataset. One that can't seek and has no state is read from its beginning after every resume;
            if it has a `set_epoch`, that is called first.
        bookmarks: from which a stream with a state may continue.
        number: of the stream, for its bookmark.

    Attributes:
        num_samples: of the epoch that `read_once` reads; None until its end is found.
        has_bookmarks: whether the stream has a state, and needs it.

    Raises:
        TaskError: from `check_stream`.
    """

    def __init__(self, stream: Any, bookmarks: Bookmarks | None = None, number: int = 0) -> None:
        check_stream(stream)
        self.num_samples: int | None = None
        self._stateful = isinstance(stream, StatefulStream)
        self.has_bookmarks = has_bookmarks(stream)
        self._number = number
        self._bookmark = bookmarks.of(number) if bookmarks is not None and self.has_bookmarks else None
        self._clock = StateClock()
        self._stream = stream
        self._name = type(stream).__name__
        self._epoch = -1  # that was asked for
        self._pass = StreamPass(-1, 0, 0, stream, iter(()))
        self._warned: set[str] = set()

    def read(self, epoch: int, positions: IntArray) -> list[Any]:
        """The samples at these positions, int64 of shape [n]; where the epoch ends early, the next one follows.

        Raises:
            TaskError: an epoch has no samples.
        """
        self._catch_up(epoch)
        samples: list[Any] = []
        for position in positions.tolist():
            while (hit := self._sample_at(epoch, position)) is None:
                self._open_next(position)
            samples.append(hit[0])
        return samples

    def _catch_up(self, epoch: int) -> None:
        """Read the epochs before this one, from the bookmark on, where the stream may count its passes itself."""
        if not self.has_bookmarks or hasattr(self._stream, "set_epoch"):
            return
        mark = self._bookmark
        first = self._epoch + 1 if mark is None else mark.epoch
        if first >= epoch:
            return
        end = len(self._stream)
        num_samples = (epoch - first) * end - (0 if mark is None else mark.position)
        if num_samples > TOLERATED_REPLAY:
            self._warn_once(
                "%s has no set_epoch: %d samples of earlier epochs are read and discarded to reach epoch %d; a method "
                "set_epoch(epoch), or read_from(epoch, position), avoids that",
                self._name,
                num_samples,
                epoch,
            )
        for past in range(first, epoch):
            while self._sample_at(past, end) is None and self._pass.next < end:
                self._open_next(end)

    def read_once(self, epoch: int, positions: IntArray) -> list[Any]:
        """The samples at these positions, int64 of shape [n], but for those after the end; sets `num_samples` there."""
        self.num_samples = None
        samples = []
        for position in positions.tolist():
            hit = self._sample_at(epoch, position)
            if hit is None:
                self.num_samples = self._end()
                break
            samples.append(hit[0])
        return samples

    def bookmark(self) -> tuple[Bookmark, ...]:
        """The stream's state at the position up to which it was read, if it has one and it is time to ask for it."""
        # before the first sample of a pass there is nothing to remember, and a state isn't always defined
        opened = self._pass
        if not self.has_bookmarks or not opened.any_read:
            return ()
        state = self._clock.take(opened.stream)
        if state is None:
            return ()
        return (Bookmark(self._number, self._epoch, opened.number, opened.begin, opened.next, state),)

    def _sample_at(self, epoch: int, position: int) -> tuple[Any] | None:
        """The sample at a position, in a tuple; None if the pass ends before it."""
        if epoch != self._epoch or position < self._pass.next:
            self._epoch = epoch
            self._pass = self._open_at_bookmark(position) or self._open_pass(epoch, 0, position)
        return self._pass.read_to(position)

    def _open_at_bookmark(self, position: int) -> StreamPass | None:
        """The pass that continues from the bookmark, which counts only for the first pass; None if it doesn't fit."""
        mark = self._bookmark
        self._bookmark = None
        if mark is None or mark.epoch != self._epoch or mark.position > position:
            return None
        stream = self._stream_for_pass(mark.pass_number)
        # a copy: the stream may change it in place, and the bookmark may be saved once more
        stream.load_state_dict(deepcopy(mark.state))
        return StreamPass(mark.pass_number, mark.begin, mark.position, stream, iter(stream))

    def _open_pass(self, number: int, begin: int, position: int) -> StreamPass:
        if isinstance(self._stream, SeekableStream):
            samples = iter(self._stream.read_from(number, position - begin))
            return StreamPass(number, begin, position, self._stream, samples)
        # after another warning, those samples are counted already
        if self.has_bookmarks and not self._warned and position - begin > TOLERATED_REPLAY:
            self._warn_once(
                "%s: %d samples are read and discarded to reach the first one of this process; a method "
                "read_from(epoch, position) avoids that",
                self._name,
                position - begin,
            )
        stream = self._stream_for_pass(number)
        return StreamPass(number, begin, begin, stream, iter(stream))

    def _stream_for_pass(self, pass_number: int) -> Any:
        # a copy, as the state of one pass must not decide where the next one begins
        stream = fresh_copy(self._stream) if self._stateful else self._stream
        # the usual name of that method, as in Hugging Face's datasets
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(pass_number)
        return stream

    def _open_next(self, position: int) -> None:
        end = self._end()
        number, begin = self._pass.number, self._pass.begin
        if end == begin:
            raise TaskError(
                f"{self._name} has no samples in epoch {number}, but some are needed: its __iter__ must "
                "start over on each call"
            )
        if hasattr(self._stream, "__len__"):
            self._warn_once(
                "%s ended after %d samples of epoch %d: its next epoch begins; make its __len__ the number of samples "
                "that it yields",
                self._name,
                end - begin,
                number,
            )
        self._pass = self._open_pass(number + 1, end, max(position, end))

    def _end(self) -> int:
        """The position after the last one of this pass, which has been read to its end."""
        ended = self._pass
        if ended.any_read or ended.next == ended.begin or not isinstance(self._stream, SeekableStream):
            return ended.next
        # opened after its end: a resumed run has to find the same end as one that read up to it
        low, high = ended.begin, ended.next
        while low < high:
            middle = (low + high) // 2
            if any(True for _ in self._stream.read_from(ended.number, middle - ended.begin)):
                low = middle + 1
            else:
                high = middle
        return low

    def _warn_once(self, message: str, *values: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message, *values)


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
        return chain.from_iterable(StreamReader(stream)._open_pass(0, 0, 0).samples for stream in self.streams)


def streams_of(dataset: Any) -> tuple[Any, ...]:
    """The streams that a dataset consists of; none if it has an index."""
    if isinstance(dataset, ShardedStream):
        return dataset.streams
    return (dataset,) if is_stream(dataset) else ()


class ShardedReader:
    """Reads samples at increasing positions of a `ShardedStream`.

    Args:
        stream: several streams as one.
        step_samples: samples per step, over all ranks.
        bookmarks: from which streams with a state may continue.

    Attributes:
        has_bookmarks: whether any of the streams has them.

    Raises:
        ConfigError: the number of streams doesn't divide that of the samples.
    """

    def __init__(self, stream: ShardedStream, step_samples: int, bookmarks: Bookmarks | None = None) -> None:
        streams = stream.streams
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
        self._numbers_read: set[int] = set()
        self.has_bookmarks = any(reader.has_bookmarks for reader in self._readers)

    def read(self, epoch: int, positions: IntArray) -> list[Any]:
        """The samples at these positions, int64 of shape [n].

        Raises:
            TaskError: a stream has no samples.
        """
        steps, places = divmod(positions, self._step_samples)
        numbers, offsets = divmod(places, self._share)
        stream_positions = steps * self._share + offsets
        samples = []
        for number, place in zip(numbers.tolist(), stream_positions, strict=True):
            self._numbers_read.add(number)
            samples += self._readers[number].read(epoch, place.reshape(1))
        return samples

    def bookmark(self) -> tuple[Bookmark, ...]:
        """Those of the streams that were read since the last call."""
        numbers = sorted(self._numbers_read)
        self._numbers_read.clear()
        return tuple(mark for number in numbers for mark in self._readers[number].bookmark())


_WINDOW_SALT = 0x77696E646F77  # "window": keeps these bits apart from others drawn from the same seed


class ShuffledStream(IterableDataset[Any]):
    """A stream whose samples are shuffled in windows: the first `window` samples in a random order, then the next.

    The order depends on (seed, epoch) alone. The state is that of the stream at the beginning of a window, and a place
    in the window; a resume reads that window again. A shuffle buffer, such as that of Hugging Face's streams, mixes
    samples over longer distances, but its state would be all of its samples.

    Args:
        stream: with `state_dict` and `load_state_dict` (`StatefulStream`). If it has `set_epoch`, that is called.
        window: samples that are in memory at a time.
        seed: of the order.

    Raises:
        TaskError: the window is empty, or the stream has no state that can be continued exactly.

    Example:
        A stream of Hugging Face, whose files are shuffled too (a buffer of one sample shuffles nothing else)::

            ShuffledStream(dataset.shuffle(seed=1, buffer_size=1), window=10_000, seed=1)
    """

    def __init__(self, stream: Any, window: int, seed: int) -> None:
        if window < 1:
            raise TaskError(f"ShuffledStream needs a window of at least 1 sample, got {window}")
        if not has_bookmarks(stream):
            raise TaskError(
                f"ShuffledStream needs a stream with state_dict and load_state_dict, but {type(stream).__name__} has "
                "none, or it has a shuffle buffer, which its state leaves out: remove the buffer"
            )
        self._stream = stream
        self._window = window
        self._seed = seed
        self._epoch = 0
        self._state: Mapping[str, Any] = {"window": 0, "place": 0, "stream": None}

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        self._epoch = epoch

    def state_dict(self) -> Mapping[str, Any]:
        """See `StatefulStream`."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `StatefulStream`."""
        self._state = state

    def __iter__(self) -> Iterator[Any]:
        window, done, state = (self._state[name] for name in ("window", "place", "stream"))
        stream = fresh_copy(self._stream)
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(self._epoch)
        if state is not None:
            # copies, here and below: the stream may change its own in place
            stream.load_state_dict(deepcopy(state))
        samples = iter(stream)
        while contents := list(islice(samples, self._window)):
            bits = keyed_bits(self._seed, _WINDOW_SALT, self._epoch, window, np.arange(len(contents)))
            for place, number in enumerate(np.argsort(bits, kind="stable").tolist()):
                if place >= done:
                    self._state = {"window": window, "place": place + 1, "stream": state}
                    yield contents[number]
            window, done, state = window + 1, 0, deepcopy(stream.state_dict())

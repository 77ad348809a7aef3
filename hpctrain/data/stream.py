"""Iterable datasets, read by position like every other dataset, by seeking or by replaying."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import IterableDataset

from hpctrain.data.keyed_random import IntArray
from hpctrain.errors import TaskError

log = logging.getLogger("hpctrain.data")

TOLERATED_REPLAY = 1000
"""Number of samples to read and discard without a warning."""


@runtime_checkable
class SeekableStream(Protocol):
    """An iterable dataset that can start anywhere, so that a resume costs nothing.

    Every rank and every DataLoader worker reads the same stream and takes its own positions of it: an implementation
    must not split itself among ranks or workers. With `__len__`, that many samples are an epoch; without it, the run is
    one epoch and needs trainer.max_steps.
    """

    def read_from(self, epoch: int, position: int) -> Iterator[Any]:
        """The samples of an epoch from a position on, both counted from 0; the same samples at each call."""
        ...


class StreamReader:
    """Reads samples at increasing positions of a stream, and skips those in between, which belong to other ranks.

    Args:
        stream: an iterable dataset. One that can't seek is read from its beginning after every resume; if it has a
            `set_epoch`, that is called first.
    """

    def __init__(self, stream: IterableDataset[Any]) -> None:
        self._stream = stream
        self._samples: Iterator[Any] = iter(())
        self._epoch = -1
        self._next = 0
        self._warned = False

    def read(self, epoch: int, positions: IntArray) -> list[Any]:
        """The samples at these positions, int64 of shape [n].

        Raises:
            TaskError: the stream ends before them.
        """
        return [self._read_one(epoch, position) for position in positions.tolist()]

    def _read_one(self, epoch: int, position: int) -> Any:
        if epoch != self._epoch or position < self._next:
            self._open(epoch, position)
        try:
            while True:
                sample = next(self._samples)
                self._next += 1
                if self._next > position:
                    return sample
        except StopIteration:
            raise TaskError(
                f"{type(self._stream).__name__} ended after {self._next} samples of epoch {epoch}, before sample "
                f"{position}: make its __len__ the number of samples that it yields"
            ) from None

    def _open(self, epoch: int, position: int) -> None:
        self._epoch = epoch
        if isinstance(self._stream, SeekableStream):
            self._samples = self._stream.read_from(epoch, position)
            self._next = position
            return
        if position > TOLERATED_REPLAY and not self._warned:
            self._warned = True
            log.warning(
                "%s can't seek: %d samples are read and discarded to reach the position of the run; a method "
                "read_from(epoch, position) avoids that",
                type(self._stream).__name__,
                position,
            )
        # the usual name of that method, as in Hugging Face's datasets
        set_epoch = getattr(self._stream, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        self._samples = iter(self._stream)
        self._next = 0

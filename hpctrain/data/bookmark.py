"""Bookmarks: the states that streams report of their own position, from which a resume continues."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from hpctrain.errors import TaskError

TIME_SHARE = 0.01
"""Largest share of the time of reading that may be spent on a stream's state."""


@runtime_checkable
class StatefulStream(Protocol):
    """An iterable dataset that saves and restores its position, as Hugging Face's and torchdata's do.

    Every rank and every DataLoader worker reads the same stream and takes its own samples of it. A resume loads the
    newest saved state, at any world size, and discards the samples between it and the position of the run.
    """

    def __iter__(self) -> Iterator[Any]:
        """Start a pass.

        A stream with `set_epoch` yields the samples of the epoch that was set. Any other stream yields the same samples
        each time, or counts its passes and has their number in its state. It must keep that count in an object that the
        copies of the stream share, and not in a plain attribute: hpctrain copies the stream for each pass.

        After `load_state_dict` the first pass begins with the sample after those that the state counts as read.
        """

    def state_dict(self) -> Mapping[str, Any]:
        """The position in the current pass, right after each sample.

        Returns:
            Tensors, numbers, strings, dicts, lists and tuples.
        """

    def load_state_dict(self, state: Any) -> None:
        """Continue from a result of `state_dict`."""


class Bookmark(NamedTuple):
    """The state of a stream at a position.

    It belongs to the stream and not to a rank, as in torchdata, whose states don't fit another world size.

    Attributes:
        stream: the stream's number in a `ShardedStream`; 0 for any other stream.
        epoch: of the run.
        pass_number: of the stream; later than the epoch if a pass ended early.
        begin: position at which the pass begins.
        position: of the next sample.
        state: the result of `state_dict`.
    """

    stream: int
    epoch: int
    pass_number: int
    begin: int
    position: int
    state: Any


MarkedBatch: TypeAlias = tuple[Any, tuple[Bookmark, ...]]
"""A batch, and bookmarks that don't lie behind its first sample."""


class Bookmarks:
    """The newest bookmark of each stream.

    Args:
        bookmarks: those to begin with.
    """

    def __init__(self, bookmarks: Iterable[Bookmark] = ()) -> None:
        self._newest: dict[int, Bookmark] = {}
        self.add(bookmarks)

    def add(self, bookmarks: Iterable[Bookmark]) -> None:
        """Keep those that are newer."""
        for bookmark in bookmarks:
            newest = self._newest.get(bookmark.stream)
            if newest is None or (newest.epoch, newest.position) <= (bookmark.epoch, bookmark.position):
                self._newest[bookmark.stream] = bookmark

    def of(self, stream: int) -> Bookmark | None:
        """The bookmark of a stream."""
        return self._newest.get(stream)

    def __iter__(self) -> Iterator[Bookmark]:
        return iter(self._newest.values())


class StateClock:
    """Says when to ask a stream for its state: often if that is cheap, and seldom if it isn't."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def take(self, stream: Any) -> Any:
        """The stream's state; None if it isn't due."""
        begin_s = time.perf_counter()
        if begin_s < self._next_s:
            return None
        # a copy: the stream may go on changing its own
        state = deepcopy(stream.state_dict())
        now_s = time.perf_counter()
        self._next_s = now_s + (now_s - begin_s) / TIME_SHARE
        return state


def fresh_copy(stream: Any) -> Any:
    """A copy of a stream object with its own attributes, so that reading leaves the original alone.

    It has its own dicts, lists, tuples and stateful streams at any depth of the attributes, since the state of the
    stream may include theirs. It shares all other objects, such as open files, and nested streams that can't be copied.
    Hugging Face's streams share their attributes with a `copy.copy`, and their epoch with other processes.

    Raises:
        TaskError: the stream itself can't be copied.
    """
    name = type(stream).__name__
    if not hasattr(stream, "__dict__"):
        raise TaskError(
            f"the attributes of {name} are in __slots__ alone, so a pass can't have a copy of them: remove its "
            "__slots__"
        )
    if (copied := _copy_stream(stream, {})) is None:
        raise TaskError(
            f"a pass needs a copy of the {name}, which can't be made without arguments: let its __new__ take none"
        )
    return copied


def _copy_stream(stream: Any, copies: dict[int, Any]) -> Any:
    """Copy a stream and its attributes; None if they are in no ``__dict__``, or its type can't be made by itself."""
    kind: Any = type(stream)
    if not hasattr(stream, "__dict__"):
        return None
    try:
        copied = kind.__new__(kind)
    except TypeError:
        return None
    copies[id(stream)] = copied
    for name, value in vars(stream).items():
        shared = isinstance(value, Tensor) and value.is_shared()  # type: ignore[no-untyped-call]  # torch's
        copied.__dict__[name] = value.clone() if shared else _copy_value(value, copies)
    return copied


def _copy_value(value: Any, copies: dict[int, Any]) -> Any:
    """Copy streams and plain containers, and share the rest; `copies` has those made so far, by identity."""
    if id(value) in copies:
        return copies[id(value)]
    if _is_stateful(value):
        copied = _copy_stream(value, copies)
        # shared, not refused: types of C extensions can't be copied, and the stream around may start them anew itself
        return value if copied is None else copied
    if type(value) is tuple:
        return tuple(_copy_value(item, copies) for item in value)
    if type(value) is list:
        items: list[Any] = []
        copies[id(value)] = items
        items += [_copy_value(item, copies) for item in value]
        return items
    if type(value) is dict:
        mapping: dict[Any, Any] = {}
        copies[id(value)] = mapping
        mapping |= {key: _copy_value(item, copies) for key, item in value.items()}
        return mapping
    return value


def _is_stateful(value: Any) -> bool:
    # by its type: an attribute may also be a class that has these methods
    return issubclass(type(value), StatefulStream)


def loses_samples(stream: Any) -> bool:
    """Whether the state of a stream of Hugging Face, or of one around it, leaves out samples in a shuffle buffer.

    IterableDataset.state_dict of datasets 5.2: "examples from shuffle buffers are lost when resuming".
    """
    visited: set[int] = set()
    values = [stream]
    while values:
        value = values.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if _is_stateful(value):
            # a buffer of one sample is how its users shuffle files alone
            if type(value).__name__ == "BufferShuffledExamplesIterable" and value.buffer_size > 1:
                return True
            values += getattr(value, "__dict__", {}).values()
        elif type(value) in (list, tuple):
            values += value
        elif type(value) is dict:
            values += value.values()
    return False

"""How the batches of a rank come to its GPU."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch

from hpctrain.data.micro_batch import iterate_tensors

Item = TypeVar("Item")
Move = Callable[[Any, torch.device], Any]


class Transfer(Protocol):
    """Brings batches to a device, each in two parts.

    Attributes:
        may_be_early: whether a batch may begin before the step that precedes it.
    """

    may_be_early: bool

    def begin(self, batch: Any) -> Any:
        """Begin with a batch; called once for each, in their order."""
        ...

    def finish(self, begun: Any) -> Any:
        """Return the batch on the device, from what `begin` returned; called when the batch is asked for."""
        ...


class CopyInBackground:
    """Copies batches to the GPU while it computes the previous ones.

    The copies have their own stream, which never waits; the computing stream waits for a batch's copy. The host, which
    runs ahead of the GPU, waits for neither if the batch is in page-locked memory.

    Args:
        move: copies every tensor of a batch to a device without waiting, and does nothing else.
        device: of this rank.
    """

    may_be_early = True

    def __init__(self, move: Move, device: torch.device) -> None:
        self._move = move
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def begin(self, batch: Any) -> tuple[Any, torch.cuda.Event]:
        """Begin to copy a batch."""
        with torch.cuda.stream(self._copies):
            copy = self._move(batch, self._device)
        # an event, since the stream goes on with the next batch before this one is asked for
        return copy, self._copies.record_event()

    def finish(self, begun: tuple[Any, torch.cuda.Event]) -> Any:
        """Return the copy, for use in the current stream."""
        copy, copied = begun
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(copied)
        for tensor in iterate_tensors(copy):
            if tensor.is_cuda:
                # the allocator must not reuse the copying stream's memory before the computing stream has used it
                tensor.record_stream(computing)
        return copy


class MoveOnDemand:
    """Has a task's own method bring each batch to the GPU when it is asked for, in the stream that computes.

    Such a method may draw random numbers, or depend on the step, so that an early call would break the exactness of a
    resume. It may also return tensors in objects in which `iterate_tensors` doesn't find them, and the allocator would
    reuse their memory too early after a copy in another stream.

    Args:
        move: called once for each batch.
        device: of this rank.
    """

    may_be_early = False

    def __init__(self, move: Move, device: torch.device) -> None:
        self._move = move
        self._device = device

    def begin(self, batch: Any) -> Any:
        """Return the batch."""
        return batch

    def finish(self, begun: Any) -> Any:
        """Move the batch."""
        return self._move(begun, self._device)


def transferred(batches: Iterable[Any], transfer: Transfer, *, one_early: bool) -> Iterator[Any]:
    """Return the same batches on the device.

    Args:
        batches: in their order.
        transfer: brings them there.
        one_early: whether each begins before its predecessor is given out, if the transfer permits.
    """
    # generators, and not map(): a StopIteration in a task's method must not end the batches
    begun = (transfer.begin(batch) for batch in batches)
    ready = taken_early(begun) if one_early and transfer.may_be_early else begun
    return (transfer.finish(each) for each in ready)


def taken_early(items: Iterator[Item]) -> Generator[Item, None, None]:
    """Yield the same items, and take each before its predecessor is yielded.

    An error in taking an item is raised when that item is asked for.
    """
    held: list[Item] = []
    try:
        for item in items:
            yield from held
            held = [item]
    except Exception:
        yield from held
        raise
    yield from held

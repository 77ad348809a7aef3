"""Move a rank's batches to its GPU."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch

from hpctrain.data.micro_batch import iterate_tensors

Item = TypeVar("Item")
Move = Callable[[Any, torch.device], Any]


class BatchTransfer(Protocol):
    """Brings batches to a device, each in two parts.

    Attributes:
        allows_prefetch: whether the transfer of a batch may start before the previous step.
    """

    allows_prefetch: bool

    def begin(self, batch: Any) -> Any:
        """Start the transfer of a batch; called once for each, in their order."""
        ...

    def finish(self, begun: Any) -> Any:
        """Return the batch on the device, from what `begin` returned; called when the batch is asked for."""
        ...


class CopyInBackground:
    """Copies batches to the GPU while it computes the previous ones.

    The copies run in a stream of their own, which waits for nothing; the computing stream waits for a batch's copy.
    The host, which runs ahead of the GPU, waits for neither if the batch is in page-locked memory.

    Args:
        move: copies every tensor of a batch to a device without waiting, and does nothing else.
        device: of this rank.
    """

    allows_prefetch = True

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
    """Calls a task's own `to_device` when a batch is needed, in the stream that computes.

    Such a method may draw random numbers, or depend on the step, so that an early call would break the exactness of a
    resume. It may also return tensors in objects in which `iterate_tensors` doesn't find them, and the allocator would
    reuse their memory too early after a copy in another stream.

    Args:
        move: called once for each batch.
        device: of this rank.
    """

    allows_prefetch = False

    def __init__(self, move: Move, device: torch.device) -> None:
        self._move = move
        self._device = device

    def begin(self, batch: Any) -> Any:
        """Return the batch."""
        return batch

    def finish(self, begun: Any) -> Any:
        """Move the batch."""
        return self._move(begun, self._device)


def transfer_batches(batches: Iterable[Any], transfer: BatchTransfer, *, prefetch_one: bool) -> Iterator[Any]:
    """Return the same batches on the device.

    Args:
        batches: in their order.
        transfer: brings them there.
        prefetch_one: whether to start each transfer before the previous batch is yielded, if the transfer allows it.
    """
    # generators, and not map(): a StopIteration in a task's method must not end the batches
    begun = (transfer.begin(batch) for batch in batches)
    ready = one_ahead(begun) if prefetch_one and transfer.allows_prefetch else begun
    return (transfer.finish(each) for each in ready)


def one_ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
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

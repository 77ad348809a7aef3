"""Move a rank's batches to its GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from hpctrain.data.micro_batch import iterate_tensors, map_tensors

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


class PendingCopies:
    """Keeps batches on the host until their copies to the GPU are done.

    torch could free them earlier, since it records an event when it frees a page-locked tensor. But it does so in a
    destructor, which ends the process if the GPU is lost by then (`hpctrain.attempt.lost_gpu`). Here an event is asked
    for before anything is freed, and a lost GPU raises its error.
    """

    def __init__(self) -> None:
        self._sources: deque[tuple[object, torch.cuda.Event]] = deque()

    def add(self, source: object, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Keep what a stream has begun to copy, and drop earlier sources whose copies are done.

        Args:
            source: the host's tensors of a batch.
            stream: that copies them.

        Returns:
            An event after the copy.

        Raises:
            RuntimeError: the GPU reports an error.
        """
        done: torch.cuda.Event = stream.record_event()
        self._sources.append((source, done))
        while self._sources and self._sources[0][1].query():  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._sources.popleft()
        return done


class CopyInBackground:
    """Copies batches to the GPU while it computes the previous ones.

    The copies run in a stream of their own, which waits for no step; the computing stream waits for a batch's copy. The
    host, which runs ahead of the GPU, waits for neither if the batch is in page-locked memory.

    The computing stream then copies the batch once more, into memory of its own. torch's allocator hands memory out
    again in the order of the stream that it was allocated in, without waiting for others. So a task may keep a tensor
    of a batch for as long as it likes, and the copying stream reuses the first copy's memory only after the second
    copy. This replaces `record_stream`, which can end the process once the GPU is lost
    (`hpctrain.attempt.lost_gpu`). It takes the memory of one more batch, and the time to read and write it on the
    device, a few hundredths of that of the copy from the host.

    Args:
        move: copies every tensor of a batch to a device without waiting, and does nothing else.
        device: of this rank.
    """

    allows_prefetch = True

    def __init__(self, move: Move, device: torch.device) -> None:
        self._move = move
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._cloned: torch.cuda.Event | None = None
        self._pending = PendingCopies()

    def begin(self, batch: Any) -> tuple[Any, torch.cuda.Event]:
        """Begin to copy a batch."""
        if self._cloned is not None:
            self._copies.wait_event(self._cloned)
        source = _on_host(batch)
        with torch.cuda.stream(self._copies):
            device_batch = self._move(batch, self._device)
        # an event, since the stream goes on with the next batch before this one is asked for
        return device_batch, self._pending.add(source, self._copies)

    def finish(self, begun: tuple[Any, torch.cuda.Event]) -> Any:
        """Return the copy, for use in the current stream."""
        device_batch, copied = begun
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(copied)
        batch = map_tensors(partial(_owned_by, computing), device_batch)
        # the memory of device_batch, and of all batches before it, may be written again after this event
        self._cloned = computing.record_event()
        return batch


class MoveOnDemand:
    """Calls a task's own `to_device` when a batch is needed, in the stream that computes.

    Such a method may draw random numbers, or depend on the step, so that an early call would break the exactness of a
    resume. It may also return tensors in objects in which `map_tensors` doesn't find them, and the allocator would
    reuse their memory too early after a copy in another stream.

    Args:
        move: called once for each batch.
        device: of this rank.
    """

    allows_prefetch = False

    def __init__(self, move: Move, device: torch.device) -> None:
        self._move = move
        self._device = device
        self._pending = PendingCopies()

    def begin(self, batch: Any) -> Any:
        """Return the batch."""
        return batch

    def finish(self, begun: Any) -> Any:
        """Move the batch."""
        if self._device.type != "cuda":
            return self._move(begun, self._device)
        source = _on_host(begun)  # a task may move a batch in place
        batch = self._move(begun, self._device)
        self._pending.add(source, torch.cuda.current_stream(self._device))
        return batch


def _on_host(batch: Any) -> list[Tensor]:
    return [tensor for tensor in iterate_tensors(batch) if not tensor.is_cuda]


def _owned_by(stream: torch.cuda.Stream, tensor: Tensor) -> Tensor:
    """Return a tensor whose memory other streams don't use again too early: a copy made in this stream."""
    if not tensor.is_cuda:
        return tensor
    if type(tensor) is not Tensor:
        # a copy may share a part of its memory, as that of a jagged nested tensor shares the offsets
        tensor.record_stream(stream)
        return tensor
    return tensor.clone()


def transfer_batches(batches: Iterable[Any], transfer: BatchTransfer, *, prefetch_one: bool) -> Iterator[Any]:
    """Return the same batches on the device.

    Args:
        batches: in their order.
        transfer: brings them there.
        prefetch_one: whether to start each transfer before the previous batch is yielded, if the transfer allows it.
    """
    # generators, and not map(): a StopIteration in a task's method must not end the batches
    begun = (transfer.begin(batch) for batch in batches)
    for started in one_ahead(begun) if prefetch_one and transfer.allows_prefetch else begun:
        finished = [transfer.finish(started)]
        del started  # before the next transfer begins, which can use its memory
        yield finished.pop()


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

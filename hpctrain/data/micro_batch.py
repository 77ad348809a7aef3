"""A micro-batch, the tensors inside the containers that collation makes, and their way to the GPU."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from hpctrain.data.keyed_random import IntArray


class MicroBatch(NamedTuple):
    """The input of one forward and backward pass.

    Attributes:
        batch: the collated samples of the dataset, on the CPU.
        num_samples: samples in it; 0 if the rank has none left in a partial step. The batch then holds one stand-in
            sample, with which the rank takes part in the collectives; its loss must not be counted.
        divisor: divides the mean loss before the backward pass (`BatchPlan.divisors`): the accumulation in a full
            step, infinite for a stand-in, so that its gradients are zero.
        is_last: whether this is the step's last micro-batch: synchronise gradients, then update the weights.
        indices: the samples' indices, int64; also for a stand-in.
        on_device: whether the batch is on the rank's device already (`BatchTransfer`).
        weight: of the losses of the batch (`Task.loss_weight`); None: ``num_samples``.
        num_delivered: samples in the batch, if it is weighed.
        gradient_factor: of a step's last micro-batch: the factor by which to rescale the gradients; 0 if no batch of
            the step has a weight.
    """

    batch: Any
    num_samples: int
    divisor: float
    is_last: bool
    indices: IntArray
    on_device: bool = False
    weight: float | None = None
    num_delivered: int = 0
    gradient_factor: float = 1.0


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Replace every tensor of a batch.

    Descends into mappings, tuples (named ones too), lists and dataclasses, which are copied without a call of
    `__init__` and `__post_init__`; anything else is returned unchanged.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return _rebuild(batch, {key: map_tensors(function, value) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_tensors(function, value) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        # without __init__: a batch is copied several times on its way, and __post_init__ may change its tensors
        mapped = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(mapped, field.name, map_tensors(function, getattr(batch, field.name)))
        return mapped
    return batch


def iterate_tensors(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch, in the order in which its containers hold them."""
    if isinstance(batch, Tensor):
        yield batch
    for value in _fields(batch):
        yield from iterate_tensors(value)


def _fields(batch: Any) -> Iterable[Any]:
    """Return the values in a container; none of any other value."""
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, (tuple, list)):
        return batch
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    return ()


def count_samples(batch: Any, num_asked: int, num_read: int) -> int:
    """Return the number of samples in a collated batch.

    If anything in it has the length ``num_read``, it holds those. Otherwise some were left out, or replaced, and the
    length of what comes first counts, unless that is more than was asked for: points of clouds, or nodes of graphs.

    Args:
        batch: tensors, arrays, or lists with an element for each sample, in containers; anything else has no length.
        num_asked: samples that were asked for.
        num_read: those of them that could be read.
    """
    if batch is None:
        return 0
    lengths = list(_lengths(batch))
    return num_read if not lengths or num_read in lengths or lengths[0] > num_asked else lengths[0]


def _lengths(batch: Any, *, is_field: bool = False) -> Iterator[int]:
    """The lengths of a batch's tensors, arrays and lists; not of a list of fields, unless it is empty."""
    fields = _fields(batch)
    if isinstance(batch, (Tensor, np.ndarray)):
        if batch.ndim:
            yield len(batch)
    elif isinstance(batch, (tuple, list)):
        if is_field or not batch:
            yield len(batch)
        fields = () if is_field and _is_of_samples(batch) else batch
    for field in fields:
        yield from _lengths(field, is_field=True)


def _is_of_samples(batch: Sequence[Any]) -> bool:
    """Whether a list has an element for each sample, whose own lengths say nothing, and not a tensor for each field."""
    lengths = {len(element) for element in batch if isinstance(element, Tensor) and element.dim()}
    return len(lengths) > 1 or all(isinstance(element, Mapping) for element in batch)


def _rebuild(original: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return values
    try:
        # OrderedDict and Hugging Face's BatchEncoding, for example, are made from a dict
        return type(original)(values)  # type: ignore[call-arg]
    except TypeError:
        return values


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

    def finish(self, pending: Any) -> Any:
        """Return the batch on the device, from what `begin` returned; called when the batch is asked for."""


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
    device, a few hundredths of that of the copy from the host. If the copying stream waited for all earlier computation
    instead, no copy would overlap with a step without loading processes.

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
        source = _host_tensors(batch)
        with torch.cuda.stream(self._copies):
            device_batch = self._move(batch, self._device)
        # an event, since the stream goes on with the next batch before this one is asked for
        return device_batch, self._pending.add(source, self._copies)

    def finish(self, pending: tuple[Any, torch.cuda.Event]) -> Any:
        """Return the copy, for use in the current stream."""
        device_batch, copied = pending
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(copied)
        batch = map_tensors(partial(_copy_in_stream, computing), device_batch)
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

    def finish(self, pending: Any) -> Any:
        """Move the batch."""
        if self._device.type != "cuda":
            return self._move(pending, self._device)
        source = _host_tensors(pending)  # a task may move a batch in place
        batch = self._move(pending, self._device)
        self._pending.add(source, torch.cuda.current_stream(self._device))
        return batch


def _host_tensors(batch: Any) -> list[Tensor]:
    return [tensor for tensor in iterate_tensors(batch) if not tensor.is_cuda]


def _copy_in_stream(stream: torch.cuda.Stream, tensor: Tensor) -> Tensor:
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
    pending = (transfer.begin(batch) for batch in batches)
    for started in one_ahead(pending) if prefetch_one and transfer.allows_prefetch else pending:
        finished = [transfer.finish(started)]
        del started  # before the next transfer begins, which can use its memory
        yield finished.pop()


def one_ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
    """Yield the same items, and take each before its predecessor is yielded.

    An error in taking an item is raised when that item is asked for.
    """
    waiting: list[Item] = []
    try:
        for item in items:
            yield from waiting
            waiting = [item]
    except Exception:
        yield from waiting
        raise
    yield from waiting

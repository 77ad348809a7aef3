"""The neighbours of a rank in its pipeline: the wires to them, and the ranks with which it shares parameters."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.config.mesh import MeshShape
from hpctrain.errors import TaskError
from hpctrain.rank.message import decode, encode

TAG = 27
"""Of the messages on the control group that describe tensors."""


class Form(NamedTuple):
    """Shape, type and gradient of a tensor, by which its receiver allocates it.

    Attributes:
        shape: its sizes.
        dtype: of its elements, without `torch.`.
        requires_grad: whether the sender expects its gradient.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool

    def __str__(self) -> str:
        """Such as ``float32[2, 3]``."""
        return f"{self.dtype}{list(self.shape)}{'' if self.requires_grad else ' without a gradient'}"

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """The form of a tensor."""
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        """Return a tensor of this form, without a gradient."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)


class Arrival(NamedTuple):
    """Tensors on their way to this rank.

    Attributes:
        tensors: that are being received.
        works: of their transfers.
    """

    tensors: list[Tensor]
    works: Sequence[dist.Work]

    def wait(self) -> list[Tensor]:
        """Wait for the tensors, on a GPU in its stream, and return them."""
        for work in self.works:
            work.wait()
        return self.tensors


class Wire:
    """Carries tensors one way between two neighbours, in the order in which they are sent.

    Sends don't wait for the receiver. A group for each direction keeps NCCL from waiting for a transfer of the other
    one.

    Args:
        group: of the two ranks, for this direction alone.
        control: of all ranks, on the CPU.
        peer: number of the other rank among all.
        device: of this rank.
    """

    def __init__(self, group: dist.ProcessGroup, control: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._group = group
        self._control = control
        self._peer = peer
        self._device = device
        self._forms: dict[Hashable, list[Form]] = {}
        self._transfers: list[tuple[dist.Work, Tensor]] = []

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send tensors whose forms the receiver knows."""
        # kept until they have arrived
        self._transfers = [transfer for transfer in self._transfers if not transfer[0].is_completed()]
        for tensor in tensors:
            self._send(tensor.detach().contiguous(), self._group)

    def send_described(self, key: Hashable, tensors: Sequence[Tensor]) -> None:
        """Send tensors, preceded by their forms the first time a key is used.

        Args:
            key: of the kind; receiver and sender use the same keys in the same order.
            tensors: whose forms follow from the key.

        Raises:
            TaskError: they don't.
        """
        forms = [Form.of(tensor) for tensor in tensors]
        first_forms = self._forms.setdefault(key, forms)
        if first_forms is forms:
            message = encode([[list(form.shape), form.dtype, form.requires_grad] for form in forms])
            self._send(torch.tensor([message.numel()]), self._control)
            self._send(message, self._control)
        elif first_forms != forms:
            before, now = (", ".join(map(str, several)) for several in (first_forms, forms))
            raise TaskError(
                f"a stage of the pipeline returned {before}, and now {now}, for batches of the same shapes: shapes, "
                "types and whether a gradient is required may depend on the shapes of a batch alone"
            )
        self.send(tensors)

    def forms(self, key: Hashable) -> list[Form]:
        """Return what the tensors of a kind are like; waits for the sender if they are the first ones."""
        if key not in self._forms:
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, self._peer, group=self._control, tag=TAG)
            message = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(message, self._peer, group=self._control, tag=TAG)
            self._forms[key] = [Form(tuple(shape), dtype, grad) for shape, dtype, grad in decode(message)]
        return self._forms[key]

    def knows(self, key: Hashable) -> bool:
        """Whether the forms of a kind are known, so that `forms` doesn't wait."""
        return key in self._forms

    def expect(self, forms: Sequence[Form]) -> Arrival:
        """Begin to receive tensors of these forms, in the order in which they are sent."""
        tensors = [form.empty(self._device) for form in forms]
        works = [dist.irecv(tensor, self._peer, group=self._group) for tensor in tensors]
        return Arrival(tensors, [work for work in works if work is not None])

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        for work, _ in self._transfers:
            work.wait()
        self._transfers = []

    def _send(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        tag = TAG if group is self._control else 0
        work = dist.isend(tensor, self._peer, group=group, tag=tag)
        assert work is not None
        self._transfers.append((work, tensor))


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The wires of a rank in a pipeline; the last position is the neighbour of the first one, for interleaved stages.

    Attributes:
        position: of this rank, from 0 for the model's first layers.
        degree: number of positions.
        from_before: activations of the position before.
        to_next: activations for the next position.
        from_next: gradients of the next position.
        to_before: gradients for the position before.
    """

    position: int
    degree: int
    from_before: Wire
    to_next: Wire
    from_next: Wire
    to_before: Wire

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        self.to_next.finish()
        self.to_before.finish()


def ranks_at(shape: MeshShape, position: int) -> range:
    """Return the ranks at a position: the first ranks are at the last one, since rank zero logs the loss."""
    begin = (shape.pipeline - 1 - position) * shape.ranks_per_stage
    return range(begin, begin + shape.ranks_per_stage)


def join_neighbours(
    shape: MeshShape, rank: int, control: dist.ProcessGroup, device: torch.device, timeout: timedelta
) -> Neighbours:
    """Make the groups of all neighbours; collective over all ranks.

    Each rank has four, and all are made one after the other. With NCCL, which hasn't been tried, they take GPU memory.

    Args:
        shape: of the mesh, with more than one position.
        rank: of this process.
        control: group of all ranks, on the CPU.
        device: of this rank.
        timeout: bound on each transfer.
    """
    # by whether this rank is the first one of the two, and whether the wire leads forwards
    wires: dict[tuple[bool, bool], Wire] = {}
    for first in range(shape.pipeline):
        following = (first + 1) % shape.pipeline
        for is_forward in (True, False):
            for pair in zip(ranks_at(shape, first), ranks_at(shape, following), strict=True):
                group = dist.new_group(list(pair), timeout=timeout, group_desc="pipeline")
                if rank in pair:
                    is_first = rank == pair[0]
                    wires[is_first, is_forward] = Wire(group, control, pair[1] if is_first else pair[0], device)
    return Neighbours(
        position=shape.position(rank),
        degree=shape.pipeline,
        from_before=wires[False, True],
        to_next=wires[True, True],
        from_next=wires[True, False],
        to_before=wires[False, False],
    )


def groups_of_positions(
    shape: MeshShape, rank: int, together: Sequence[tuple[int, ...]], timeout: timedelta
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make groups of the ranks of a pipeline that have parameters together; collective over all ranks.

    Args:
        shape: of the mesh.
        rank: of this process.
        together: positions, the same list on every rank.
        timeout: bound on each collective.

    Returns:
        The groups of this rank, by their positions.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for positions in sorted(set(together)):
        for ranks in zip(*(ranks_at(shape, position) for position in positions), strict=True):
            group = dist.new_group(list(ranks), timeout=timeout, group_desc="shared parameters")
            if rank in ranks:
                groups[positions] = group
    return groups

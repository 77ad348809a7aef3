"""The ranks of one attempt, from the view of one of them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.nn.functional import pad

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.rank.devices import resolve_backend
from hpctrain.rank.group import CONTROL, gloo_group, read_collectives, set_nccl_variables
from hpctrain.rank.message import decode, encode
from hpctrain.rank.sealed_store import SealedStore
from hpctrain.run.exit_record import Collectives

_GLOO_IDLE_S = 0.05
"""Pause between the last collective and the end of the groups."""
ABORT_S = 5.0
"""Seconds to wait for NCCL to abort its communicators: the abort waits for the GPU, which may no longer respond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The process group and this rank's devices; in a world of one there is no group, and no call communicates.

    Attributes:
        rank: in the world.
        size: number of ranks.
        local_rank: on the node.
        devices: the devices of this rank; several if a task spreads its model over them, or with nn.DataParallel.
        cores: this rank's share of the CPU cores.
        backend: of the group for tensors on the devices, `nccl` or `gloo`; empty in a world of one.
        control: a gloo group on the CPU for messages between ranks that must not stall a GPU; None in a world of one.
        store: of the ranks. Kept here because torch holds only the half of a `SealedStore` that isn't Python.
    """

    rank: int
    size: int
    local_rank: int
    devices: tuple[torch.device, ...]
    cores: int = 1
    backend: str = ""
    control: dist.ProcessGroup | None = None
    store: Store | None = None

    @property
    def device(self) -> torch.device:
        """The first device of this rank, to which batches are copied and on which it reduces."""
        return self.devices[0]

    @property
    def gpus(self) -> tuple[torch.device, ...]:
        """The devices, if they are GPUs."""
        return self.devices if self.device.type == "cuda" else ()

    @property
    def num_devices(self) -> int:
        """Number of devices over all ranks; a process on the CPU counts as one."""
        return self.size * max(1, len(self.gpus))

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank zero, which writes for all ranks."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks; collective."""
        if self.control is not None:
            dist.barrier(group=self.control)

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value at rank zero, in rank order, None elsewhere; collective, for small values.

        Args:
            value: what `message.encode` takes.
        """
        if self.control is None:
            return [value]
        # torch's own collectives for objects unpickle what they receive, which could execute code
        messages = self.gather_bytes(encode(value))
        return None if messages is None else [decode(data) for data in messages]

    def gather_bytes(self, data: Tensor) -> list[Tensor] | None:
        """Every rank's data at rank zero, in rank order, None elsewhere; collective.

        Args:
            data: uint8 of shape [n] on the CPU; n may differ between ranks.
        """
        if self.control is None:
            return [data]
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = data.numel()
        dist.all_reduce(sizes, group=self.control)
        longest = int(sizes.max())
        received = [torch.empty(longest, dtype=torch.uint8) for _ in sizes] if self.is_rank_zero else None
        dist.gather(pad(data, (0, longest - data.numel())), received, dst=0, group=self.control)
        if received is None:
            return None
        return [message[:size] for message, size in zip(received, sizes.tolist(), strict=True)]

    def broadcast(self, value: Any) -> Any:
        """Rank zero's value on every rank; collective, for small values.

        Args:
            value: what `message.encode` takes.
        """
        if self.control is None:
            return value
        data = encode(value if self.is_rank_zero else None)
        size = torch.tensor([data.numel()])
        dist.broadcast(size, src=0, group=self.control)
        if not self.is_rank_zero:
            data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self.control)
        return value if self.is_rank_zero else decode(data)

    def decide_on_rank_zero(self, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Return on every rank what rank zero decides from the values of all ranks; collective, for small values.

        Args:
            value: of this rank; what `message.encode` takes.
            decide: called on rank zero with the values in rank order; returns what `message.encode` takes.
        """
        gathered = self.gather(value)
        return self.broadcast(None if gathered is None else decide(gathered))

    def union(self, names: Iterable[str]) -> list[str]:
        """The names of all ranks, sorted, on every rank; collective."""
        return list(self.decide_on_rank_zero(sorted(names), lambda gathered: sorted(set[str]().union(*gathered))))

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all ranks in place, on the device's own group; collective."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def combine_(self, tensor: Tensor, operation: str) -> Tensor:
        """Combine a CPU tensor over all ranks in place, element by element, on the control group; collective.

        Args:
            tensor: float64 or int64, of the same shape on every rank.
            operation: `sum`, `min` or `max`.
        """
        if self.control is not None:
            operations = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
            dist.all_reduce(tensor, op=operations[operation], group=self.control)
        return tensor

    def close(self) -> None:
        """Leave the group after every rank is done; collective."""
        if self.size > 1:
            self.barrier()
            # a thread of gloo may still need the GIL to drop the barrier's Python objects, and torch 2.13 holds the GIL
            # while it joins that thread: a deadlock, unless the thread is done before
            time.sleep(_GLOO_IDLE_S)
            dist.destroy_process_group()

    def collectives(self) -> Collectives | None:
        """Return the collectives that this rank has begun, None if unknown; may be called from any thread."""
        return read_collectives()

    def communication_error(self) -> str:
        """Return what NCCL has reported about this rank's communicator; empty if nothing, or without NCCL.

        May be called from any thread. torch notes the error in a thread of its own (`ProcessGroupNCCL::getError`);
        the thread that trains doesn't see it, since it waits for the GPU, which waits for NCCL. NCCL doesn't notice the
        death of a rank that it reaches over NVLink or shared memory: the launcher or srun ends the other ranks. This
        follows torch 2.13's sources, and hasn't run with NCCL between ranks.
        """
        if self.backend != "nccl" or not dist.is_initialized():
            return ""
        try:
            group = dist.group.WORLD
            assert group is not None
            error = group._get_backend(self.device).get_error()
        except Exception:  # the group ended meanwhile, or this version of torch doesn't report it
            return ""
        return "" if error.name == "SUCCESS" else str(error.name)

    def abort(self, *, process_ends: bool = False) -> None:
        """Leave the group after a failure, without waiting for the other ranks.

        Args:
            process_ends: whether this process ends at once, which frees NCCL's communicators as well.
        """
        if self.size == 1 or not dist.is_initialized():
            return
        # destroy_process_group would wait for collectives that a failed rank never joins
        abort = dist.distributed_c10d._abort_process_group
        if self.backend != "nccl":
            abort()
        elif not process_ends:
            # not to have the thread that trains raise: the abort waits for the GPU, and may never return
            thread = threading.Thread(target=abort, name="abort", daemon=True)
            thread.start()
            thread.join(ABORT_S)


def join(
    environment: ClusterEnvironment,
    store: Store | None,
    *,
    backend: str,
    devices: tuple[torch.device, ...],
    cores: int = 1,
    timeout_s: float,
    cpu_tensors: bool = False,
) -> World:
    """Make the process groups; collective.

    Args:
        environment: this rank's place.
        store: from `meet` or `open_private_store`; None in a world of one.
        backend: `nccl`, `gloo` or `auto`.
        devices: of this rank.
        cores: of this rank (`cpu_cores`).
        timeout_s: bound in seconds on each collective.
        cpu_tensors: whether all groups also carry tensors in host memory, such as offloaded shards.
    """
    rank, size = environment.rank, environment.world_size
    world = World(rank=rank, size=size, local_rank=environment.local_rank, devices=devices, cores=cores)
    if world.gpus:
        torch.cuda.set_device(world.device)
    if store is None:
        return world
    backend = resolve_backend(backend, devices)
    if backend == "nccl":
        set_nccl_variables(os.environ, timeout_s)
    timeout = timedelta(seconds=timeout_s)
    backends = "cpu:gloo,cuda:nccl" if cpu_tensors and backend == "nccl" else backend
    torch_store = PrefixStore("world", store)
    if isinstance(store, SealedStore) and backend != "gloo":
        # NCCL's threads use the store while others may hold Python's lock and wait for them
        torch_store = store.unsealed()
    dist.init_process_group(
        backends,
        store=torch_store,
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=bound_device(backends, devices),
    )
    # NCCL carries no CPU tensors, and its collectives would stall the GPU
    control = dist.group.WORLD if backend == "gloo" else gloo_group(store, timeout, CONTROL)
    return replace(world, backend=backend, control=control, store=store)


def bound_device(backends: str, devices: tuple[torch.device, ...]) -> torch.device | None:
    """The device to which NCCL binds when the group is created, which detects a broken GPU early; None for gloo.

    With several devices NCCL binds to each when it is first used: a bound group rejects tensors on any other device,
    and DDP sends each part of a spread module from that part's device. With gloo for CPU tensors, too, it isn't bound:
    torch 2.13 splits bound groups for the dimensions of a mesh, and gives gloo the options of NCCL.
    """
    return devices[0] if backends == "nccl" and len(devices) == 1 else None

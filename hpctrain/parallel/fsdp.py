"""Shard a model over a mesh: each rank holds a part of every parameter, gradient and optimizer state.

Why it is like this: docs/adr/0024-models-sharded-over-a-mesh.md.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from hpctrain.config.mesh import keeps_gradients_whole
from hpctrain.config.parallel import Parallel
from hpctrain.errors import ConfigError, TaskError
from hpctrain.parallel.blocks import find_blocks
from hpctrain.parallel.local_part import local_part, local_parts
from hpctrain.parallel.mesh import Mesh, TrainingWorld
from hpctrain.parallel.replica import Accumulating, EvaluationContext, LossModule, Replica
from hpctrain.parallel.sharded_tensor import sizes_along
from hpctrain.phrases import counted, listed

BROADCAST_BYTES = 250 << 20
"""The size in bytes of the pieces in which buffers are sent; DDP's own."""
MIXED = "mixed torch.Tensor and DTensor"
"""In torch's error on an operation with a shard and a whole tensor."""
LARGE_BYTES = 100 << 20
"""Weights of one rank that are worth a warning if they are gathered at once."""
SHOWN_REPLICAS = 4
_EPSILON = 1e-6
"""torch.nn.utils.clip_grad_norm_ adds it to the norm by which it divides."""
_M_MMAP_THRESHOLD = -3
_MAPPED_FROM_BYTES = 4 << 20

log = logging.getLogger("hpctrain.train")


class ShardedLossModule(LossModule):
    """The root of a sharded model: gathers what belongs to no block while a whole loss or evaluation is computed.

    FSDP2 wraps the loss, and not the model: a task may call parts of the model, or its methods, and would find shards
    there. Calling it is collective: each block gathers its weights from the ranks that share a replica. As DDP does, a
    call that computes gradients begins with rank zero's buffers on every rank.

    Args:
        module: whose blocks are sharded already.
        gathered_once: the modules in it that belong to no block.
        group: ranks that have the same parts of the model; None if these are all ranks.

    Attributes:
        accumulating: makes a context for the micro-batches before the last one of a step, in which less is reduced;
            None if each of them reduces its gradients.
        copies_from_host: whether a GPU copies weights from host memory while the host continues.
    """

    def __init__(
        self, module: nn.Module, gathered_once: Sequence[nn.Module] = (), group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(module)
        self._group = group
        self.sends_buffers = True
        self.accumulating: Accumulating | None = None
        self.copies_from_host = False
        prefixes = {id(part): f"{path}." for path, part in module.named_modules() if path}
        self._places = [
            (f"{prefixes.get(id(part), '')}{name}", part._parameters, name)
            for part in gathered_once
            for name in part._parameters
        ]

    def forward(self, compute: Callable[[nn.Module], Any]) -> Any:
        """Call ``compute`` with the module.

        Raises:
            TaskError: it has changed weights that are gathered copies, or used some before they were gathered.
        """
        before = self._versions()
        try:
            output = compute(cast(nn.Module, self._modules["module"]))
        except RuntimeError as error:
            if MIXED not in str(error):
                raise
            raise TaskError(
                "the task or the model uses weights of a module outside of its forward pass, where each rank has only "
                f"a shard of them ({error}): leave that module out of parallel.blocks, or if parallel.tensor_degree is "
                "above 1, name each module that computes with the divided ones in tensor_parallel_plan"
            ) from error
        if before != (after := self._versions()):
            changed = [name for (name, _, _), old, new in zip(self._places, before, after, strict=True) if old != new]
            raise TaskError(
                f"the task changed weights in place ({listed(changed)}); with parallel=mesh they are copies, and the "
                "change would be lost: train them by an optimizer, use trainer.ema_decay, or parallel=ddp"
            )
        return output

    def __call__(self, compute: Callable[[nn.Module], Any]) -> Any:
        """Call ``compute`` with the module, whose weights are gathered as they are needed; collective."""
        if torch.is_grad_enabled():
            if self.sends_buffers:
                self.send_buffers()
            return nn.Module.__call__(self, compute)
        with self.gathered():
            return nn.Module.__call__(self, compute)

    def _versions(self) -> list[int | None]:
        """Return torch's version counter of each weight that is gathered as long as the model is called."""
        weights = (parameters[name] for _, parameters, name in self._places)
        return [None if weight is None else weight._version for weight in weights]

    def send_buffers(self) -> None:
        """Give all ranks with the same parts of the model the buffers of the first one; collective."""
        # the others belong to stages of other ranks
        if buffers := [buffer for buffer in self.buffers() if not buffer.is_meta]:
            group = self._group or dist.group.WORLD
            assert group is not None
            with torch.no_grad():
                dist._broadcast_coalesced(group, buffers, BROADCAST_BYTES, 0)  # type: ignore[attr-defined]  # DDP uses it

    def fix_sharding(self) -> None:
        """Fix which module is the root, and where the shards are, once the parameters have values.

        Otherwise torch does so in the first call, and takes a block for the root if that is called first.
        """
        cast(FSDPModule, self)._get_fsdp_state()._lazy_init()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context manager in which the model itself may be called without gradients; collective, as are the calls."""
        root = cast(FSDPModule, self)
        root.unshard()
        try:
            yield
        finally:
            # without a backward pass they would stay as they are, and later updates would go unnoticed
            for module in self.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            if self.copies_from_host:
                # the caller may change the weights next, and without a backward pass nothing has waited for the copies
                torch.accelerator.synchronize()


class FsdpReplica(Replica):
    """A replica whose parameters ranks share: each holds shards of them, and gathers a block of weights at a time.

    Ranks may also compute each layer together (`tensor_parallel.divide`).

    Args:
        root: around the model, with values.
        world: the ranks, with a mesh.
        parallel: of the configuration.
    """

    is_shared = True

    def __init__(self, root: ShardedLossModule, world: TrainingWorld, parallel: Parallel) -> None:
        assert world.mesh is not None
        super().__init__(root)
        self._root = root
        self._mesh = world.mesh
        self._parallel = parallel
        shape = world.mesh.shape
        self.divides_results = shape.tensor > 1
        self.is_mixed = self.divides_results or shape.pipeline > 1
        self.num_ranks = shape.replica_size

    def build_loss_module(self, model: nn.Module, before: nn.Module | None = None) -> nn.Module:
        """See `Replica`; the same for all losses."""
        return self._root

    def accumulating(self, loss_module: nn.Module) -> Accumulating | None:
        """See `Replica`."""
        return self._root.accumulating

    def clip(self, parameters: Sequence[Tensor], max_norm: float | None) -> Tensor | None:
        """See `Replica`."""
        if not self.is_mixed:
            return super().clip(parameters, max_norm)
        gradients = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        norm = self._total_norm(gradients)
        if gradients and norm is not None and max_norm is not None:
            clip([*gradients.values()], norm, max_norm)
        return norm

    def _total_norm(self, gradients: Mapping[Tensor, Tensor]) -> Tensor | None:
        return total_norm([*gradients.values()]) if gradients else None

    def try_gradients(self, compute: Callable[[nn.Module], Tensor], parameters: Sequence[nn.Parameter]) -> None:
        """See `Replica`."""
        # the gradients belong to the gathered weights, and reach the shards through FSDP2's hooks alone
        torch.autograd.backward(compute(self._root))
        for parameter in parameters:
            parameter.grad = None

    def evaluate(
        self, prepare: Callable[[], Callable[[nn.Module], Any]], batch: Any, number: int, context: EvaluationContext
    ) -> Any:
        """See `Replica`."""
        return self._root(prepare())

    def send_buffers(self) -> None:
        """See `Replica`."""
        self._root.send_buffers()

    def calls(self) -> AbstractContextManager[None]:
        """See `Replica`."""
        return self._root.gathered()

    def gradient_bytes(self, parameter: Tensor, *, accumulates: bool) -> int:
        """See `Replica`."""
        # with cpu_offload, only shards of gradients are on the host: the whole ones are on the GPU
        is_whole = (
            accumulates and not self._parallel.cpu_offload and keeps_gradients_whole(self._parallel, self._mesh.shape)
        )
        if not is_whole:
            return super().gradient_bytes(parameter, accumulates=accumulates)
        # FSDP2 adds up gradients in half precision in the format in which it reduces them, fp32
        return math.prod(sizes_along(parameter, "tensor")) * max(parameter.element_size(), torch.float32.itemsize)

    def describe(self, hosts: Sequence[str]) -> str:
        """See `Replica`."""
        shape = self._mesh.shape
        together = "" if shape.tensor == 1 else f", {shape.tensor} of which compute each layer together"
        picture = shape.picture([*hosts], self._parallel.stages_per_rank)
        return (
            f"{counted(shape.replicate, 'replica')} of the model, each shared by {counted(shape.replica_size, 'rank')}"
            f"{together}: {listed(picture, max_names=SHOWN_REPLICAS, separator='; ')}"
        )


def shard_model(
    model: nn.Module,
    mesh: Mesh,
    parallel: Parallel,
    *,
    block_names: Sequence[str] = (),
    ignored: Collection[nn.Parameter] = (),
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    is_logged: bool = False,
) -> ShardedLossModule:
    """Replace the parameters of a model by their shards, in place; collective if they have values.

    Args:
        model: on any device, or on `meta`; then its shards have no values yet.
        mesh: over which it is sharded.
        parallel: of the configuration.
        block_names: the task's own, where the configuration has none.
        ignored: parameters that stay as they are, because other ranks compute with them.
        compute_dtype: in which gathered weights compute; None for their own. Batch norms keep their own, and with them
            the block that they are in.
        reduce_dtype: in which gradients are added up over the ranks; None for their own.
        is_logged: whether this rank logs how the model is cut.

    Returns:
        What is called in training and in evaluations.

    Raises:
        ConfigError: a name of `parallel.blocks` matches nothing.
        TaskError: a parameter can't be sharded.
    """
    _require_dimensions(model)
    cut_at = shard_placement_fn(model, mesh) if mesh.shape.tensor > 1 else None
    is_on_gpu = mesh.device_mesh.device_type != "cpu"
    # from page-locked memory, copies to a GPU overlap with its work
    offload = CPUOffloadPolicy(pin_memory=is_on_gpu) if parallel.cpu_offload else OffloadPolicy()
    where: Any = {"mesh": mesh.data_mesh, "shard_placement_fn": cut_at, "offload_policy": offload}
    ignored_params = set(ignored)
    blocks = {
        name: block
        for name, block in find_blocks(model, parallel.blocks or block_names).items()
        if ignored_params.isdisjoint(block.parameters())
    }
    inside = {id(part) for block in blocks.values() for part in block.modules()}
    outside = [part for part in model.modules() if id(part) not in inside]
    for block in blocks.values():
        policy = _policy(block.modules(), compute_dtype, reduce_dtype)
        fully_shard(block, mp_policy=policy, reshard_after_forward=parallel.reshard_after_forward, **where)
    _prefetch([cast(FSDPModule, block) for block in blocks.values()], parallel.prefetch_blocks)
    root = ShardedLossModule(model, outside, mesh.same_stages)
    policy = _policy(outside, compute_dtype, reduce_dtype)
    # what belongs to no block is needed at the beginning and at the end of a pass, and stays gathered in between
    fully_shard(root, mp_policy=policy, reshard_after_forward=False, ignored_params=ignored_params, **where)
    root.copies_from_host = parallel.cpu_offload and is_on_gpu
    root.accumulating = _accumulating(root, mesh, parallel)
    if is_logged:
        _log_blocks(model, list(blocks))
    return root


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients, 0-d, the same on every rank; collective.

    torch's own function needs all of them on one mesh.

    Args:
        gradients: perhaps DTensors, on meshes whose dimensions are named alike. An element that several ranks hold
            counts once.
    """
    # by the dimensions of the mesh over which they are cut
    groups: defaultdict[tuple[str, ...], list[Tensor]] = defaultdict(list)
    process_groups: dict[str, dist.ProcessGroup] = {}
    for gradient in gradients:
        names = []
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            for name, placement in zip(mesh.mesh_dim_names or (), gradient.placements, strict=True):
                if not isinstance(placement, Replicate):
                    names.append(name)
                    process_groups[name] = mesh.get_group(name)
        groups[tuple(names)].append(local_part(gradient))
    keys = sorted(groups)
    norms = [torch.linalg.vector_norm(torch.stack(torch._foreach_norm(groups[key], 2.0))) for key in keys]
    # the squares of half precision would overflow
    squares = torch.stack(norms).double().square()
    for name, process_group in sorted(process_groups.items()):
        # of what isn't cut in this dimension, one rank counts
        counts = torch.tensor([name in key or not dist.get_rank(process_group) for key in keys])
        squares = torch.where(counts.to(squares.device), squares, 0.0)
        dist.all_reduce(squares, group=process_group)
    return squares.sum().sqrt().to(norms[0].dtype)


def clip(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients down to a bound of their norm, as `torch.nn.utils.clip_grads_with_norm_` does; not collective.

    Args:
        gradients: perhaps DTensors.
        norm: of all of them.
        max_norm: the bound.
    """
    factor = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    parts = local_parts(gradients)
    torch._foreach_mul_(parts, factor.to(parts[0].device))


def _prefetch(blocks: Sequence[FSDPModule], count: int) -> None:
    """Have each block gather those that follow it, in the order of the pass."""
    if not count:
        return
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch([*blocks[number + 1 : number + 1 + count]])
        block.set_modules_to_backward_prefetch([*reversed(blocks[max(0, number - count) : number])])


def _policy(
    modules: Iterable[nn.Module], compute_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> MixedPrecisionPolicy:
    """Return the formats of modules that are gathered together."""
    # torch's batch norm takes half inputs with fp32 weights and statistics, but no half weights
    has_batch_norm = any(isinstance(module, nn.modules.batchnorm._NormBase) for module in modules)
    # inputs keep their format: autocast converts them where an operation wants that
    return MixedPrecisionPolicy(None if has_batch_norm else compute_dtype, reduce_dtype, cast_forward_inputs=False)


def shard_placement_fn(model: nn.Module, mesh: Mesh) -> Callable[[nn.Parameter], Shard | None]:
    """Return what decides the dimension in which FSDP2 cuts a parameter that several ranks have divided already.

    Raises:
        ConfigError: the shards can't divide such a parameter evenly in its second dimension, as FSDP2 asks.
    """
    # it imports the styles of tensor parallelism, which takes time
    from hpctrain.parallel.tensor_parallel import second_dimension_is_cut

    for name, parameter in model.named_parameters():
        if second_dimension_is_cut(parameter) and parameter.shape[1] % mesh.shape.shard:
            problem = f"doesn't divide the {parameter.shape[1]} columns of {name}, whose rows several ranks divide"
            fitting = [str(n) for n in range(1, mesh.shape.shard + 1) if parameter.shape[1] % n == 0]
            raise ConfigError("parallel.shard_degree", mesh.shape.shard, problem, f"use one of {', '.join(fitting)}")
    return lambda parameter: Shard(1) if second_dimension_is_cut(parameter) else None


def _accumulating(root: nn.Module, mesh: Mesh, parallel: Parallel) -> Callable[[], Any] | None:
    """Return a context for the micro-batches before the last one of a step; None if they aren't different."""
    keeps_whole = keeps_gradients_whole(parallel, mesh.shape)
    if not keeps_whole and mesh.shape.replicate == 1:
        return None
    sharded = cast(FSDPModule, root)
    # reducing over the ranks of a replica keeps gradients in shards; reducing over the replicas can wait
    change = sharded.set_requires_gradient_sync if keeps_whole else sharded.set_requires_all_reduce

    @contextmanager
    def accumulating() -> Iterator[None]:
        change(False)
        try:
            yield
        finally:
            change(True)

    return accumulating


def _require_dimensions(model: nn.Module) -> None:
    scalars = [name for name, parameter in model.named_parameters() if not parameter.dim()]
    if scalars:
        raise TaskError(
            f"parallel=mesh can't shard parameters without a dimension: {listed(scalars)}. Give them the shape [1], "
            "or use parallel=ddp"
        )


def _log_blocks(model: nn.Module, names: Sequence[str]) -> None:
    if names:
        log.info("sharded in %s, gathered one at a time: %s", counted(len(names), "block"), listed(names))
    elif sum(parameter.nbytes for parameter in model.parameters()) >= LARGE_BYTES:
        log.warning(
            "%s repeats no module, so all its weights are gathered at once; name its largest parts in parallel.blocks",
            type(model).__name__,
        )


def return_freed_memory() -> None:
    """Have glibc's malloc map each large tensor by itself, so that its memory is returned as soon as it is freed.

    By default, malloc raises its bound (mallopt(3), M_MMAP_THRESHOLD) up to 32 MiB as such memory is freed, and takes
    what is below it from heaps, where small tensors between gathered blocks keep most of the freed memory. A rank then
    holds several times the memory of its shards. A fixed bound costs the page faults of the largest tensors.
    """
    allocator = ctypes.CDLL(None)
    if hasattr(allocator, "mallopt"):  # of glibc alone
        allocator.mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)

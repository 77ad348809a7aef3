"""This rank's replica of the model: synchronised batch norm, DDP, and the same buckets in every attempt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.config.parallel import Parallel
from hpctrain.errors import ConfigError
from hpctrain.parallel.data_parallel import AutocastDataParallel
from hpctrain.parallel.frozen_parameters import frozen_parameters_restored
from hpctrain.rank.compiler import compiler_spared, is_any_compiled
from hpctrain.rank.determinism import random_states_restored
from hpctrain.rank.world import World

DATA_PARALLEL_IS_SLOW = (
    "nn.DataParallel over %d GPUs copies the model to all of them in each step, and drives them by threads of one "
    "Python process, which wait for one another; parallel=ddp keeps a replica per process and overlaps communication"
)

log = logging.getLogger("hpctrain.train")


def synchronise_batchnorm(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Replace every batch norm by one over all ranks' samples.

    Args:
        model: not wrapped.
        group: of the ranks that compute with the model; None for all ranks.

    Raises:
        ConfigError: the model has no batch norm of torch.nn to replace.
    """
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        raise ConfigError(
            "trainer.sync_batchnorm", True, f"{type(model).__name__} has no batch norm of torch.nn", "set it to false"
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return converted


class LossModule(nn.Module):
    """A module whose forward pass is a whole loss, so that DDP surrounds all calls of the model and its parts at once.

    Args:
        module: with which the loss is computed.

    Attributes:
        is_sharded: whether the ranks share the module, so that a call is collective.
    """

    is_sharded = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        # DDP asks only the module that it wraps which names to leave out
        ignored: Iterable[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        self._ddp_params_and_buffers_to_ignore = [f"module.{name}" for name in ignored]

    def forward(self, compute: Callable[[nn.Module], Tensor]) -> Tensor:
        """Call ``compute``, which returns a loss, with the module."""
        return compute(self._modules["module"])  # type: ignore[arg-type]  # the constructor sets it

    # nothing hooks this module, and torch's way from a call to `forward` costs a few microseconds in each step
    __call__ = forward


def replicate_for_loss(model: nn.Module, world: World, parallel: Parallel) -> nn.Module:
    """Return a replica whose forward pass is that of a `LossModule`, with the model itself; collective.

    With parallel=data_parallel, the loss is computed with nn.DataParallel's wrapper: its forward pass splits a batch.
    """
    if parallel.kind == "data_parallel":
        return LossModule(replicate(model, world, parallel))
    return replicate(LossModule(model), world, parallel)


def replicate(model: nn.Module, world: World, parallel: Parallel) -> nn.Module:
    """Wrap the model in DDP, unless the world has one rank; collective.

    DDP sends rank zero's weights and buffers to all. A model on several devices of this rank is one replica.
    """
    if parallel.kind == "data_parallel":
        if world.is_rank_zero:
            log.warning(DATA_PARALLEL_IS_SLOW, len(world.devices))
        return AutocastDataParallel(model, device_ids=list(world.devices))
    if world.size == 1:
        return model
    options: dict[str, Any] = {
        "find_unused_parameters": parallel.find_unused_parameters,
        "bucket_cap_mb": parallel.bucket_cap_mb,
        "static_graph": parallel.static_graph,
        "gradient_as_bucket_view": parallel.gradient_as_bucket_view,
    }
    if len(world.gpus) == 1:
        options["device_ids"] = [world.device]
    with compiler_spared():
        replica = DistributedDataParallel(model, **options)
        if parallel.gradient_compression != "none":
            _compress(replica, parallel.gradient_compression)
    if world.device.type == "cuda" and world.backend == "gloo":
        replica.register_forward_hook(_wait_for_forward_pass)
    return replica


def broadcast_tensors(tensors: Iterable[Tensor], world: World) -> None:
    """Copy rank zero's parameters or buffers to all ranks, as DDP does for the model that it wraps; collective.

    In a pipeline, ranks with the same stages get those of the first one of them.
    """
    if world.size > 1:
        group = None if world.mesh is None else world.mesh.same_stages
        with torch.no_grad():
            for tensor in tensors:
                if not tensor.is_meta:
                    dist.broadcast(tensor, group=group, group_src=0)


def _compress(replica: DistributedDataParallel, gradient_format: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    replica.register_comm_hook(None, hooks[gradient_format])


def _wait_for_forward_pass(replica: DistributedDataParallel, *_: object) -> None:
    """Wait for the forward pass, so that its errors are raised here and not in gloo's threads.

    gloo's threads copy gradients to page-locked memory. After a GPU error they free it in a destructor, which ends the
    process (`hpctrain.attempt.lost_gpu`; torch 2.13, torch/csrc/distributed/c10d/ProcessGroupGlooCuda.cpp). The wait
    costs little, because gloo waits for the GPU in each exchange anyway.
    """
    if torch.is_grad_enabled() and replica.require_backward_grad_sync:
        torch.cuda.current_stream().synchronize()


@contextmanager
def modes_restored(model: nn.Module) -> Iterator[None]:
    """Restore each module's mode, training or evaluation, after the context."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def buffers_and_rng_restored(model: nn.Module, world: World) -> Iterator[None]:
    """Restore the model's buffers and modes, and the global random states, after the passes in the context.

    These are the random states of torch on the CPU and on the rank's GPUs, of NumPy and of Python.
    """
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    saved = [(buffer, buffer.detach().clone()) for _, own in buffers for buffer in own.values() if buffer is not None]
    try:
        with modes_restored(model), random_states_restored(world.gpus):
            yield
    finally:
        with torch.no_grad():
            for buffer, values in saved:
                buffer.copy_(values)
            for module, own in buffers:
                # the forward pass may have put other tensors in their places, even of another shape, or added some
                for name in module._buffers.keys() - own.keys():
                    delattr(module, name)
                module._buffers.update(own)


@contextmanager
def training_pass_undone(model: nn.Module, world: World, *, compiled: bool) -> Iterator[None]:
    """As `buffers_and_rng_restored`; also restore the parameters that require no gradient when the context begins.

    Args:
        model: that the passes go through.
        world: the ranks.
        compiled: as `frozen_parameters_restored` takes it.
    """
    with frozen_parameters_restored(model, compiled=compiled), buffers_and_rng_restored(model, world):
        yield


def settle_buckets(model: nn.Module, world: World, backward: Callable[[], None]) -> None:
    """Have DDP reach its final bucket layout before the first step; collective.

    DDP reduces its first backward with one layout and rebuilds it for all later ones. With three ranks or more the
    order of summation changes with it, and a resumed run, whose first step is a later one, would differ in the last
    bits. So every attempt starts with a throwaway backward, after which buffers, modes, frozen parameters, gradients
    and the random state are restored. In a world of one or two only a static graph needs it.

    Args:
        model: from `replicate`.
        world: the ranks.
        backward: one forward and backward of this rank, with gradient sync.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    # DDP records a static graph in the first backward, which therefore has to send gradients; the first backward of a
    # step with accumulation doesn't.
    if not model.static_graph and (world.size <= 2 or model.find_unused_parameters):
        return
    with training_pass_undone(model, world, compiled=is_any_compiled(model)):
        # of a static graph, DDP rebuilds the buckets after the second backward: the first one records the graph
        for _ in range(2 if model.static_graph else 1):
            backward()
    for parameter in model.parameters():
        parameter.grad = None


def dismantle(model: nn.Module) -> None:
    """Take the hooks of a replica from its parameters, so that another one can be built over them."""
    if isinstance(model, DistributedDataParallel):
        model._remove_autograd_hooks()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def inner(model: nn.Module) -> nn.Module:
    """The model inside DDP's and torch.compile's wrappers, whose names checkpoints use."""
    while True:
        wrapped = isinstance(model, DistributedDataParallel | AutocastDataParallel | LossModule)
        inside = model.module if wrapped else getattr(model, "_orig_mod", None)
        if not isinstance(inside, nn.Module):
            return model
        model = inside

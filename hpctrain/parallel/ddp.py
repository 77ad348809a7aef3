"""A replica of the model on each rank: DDP, nn.DataParallel, and batch norms over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.config.parallel import Parallel
from hpctrain.errors import ConfigError
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.parallel.replica import Accumulating, AutocastDataParallel, LossModule, Replica
from hpctrain.parallel.trial_pass import training_pass_undone
from hpctrain.rank.compiler import compiler_spared, is_any_compiled
from hpctrain.rank.world import World


def build_whole_replica(model: nn.Module, world: TrainingWorld, parallel: Parallel) -> Replica:
    """Choose the replica of a model that each rank has whole, without `parallel=mesh`.

    Args:
        model: on its devices, not wrapped.
        world: the ranks.
        parallel: of the configuration.
    """
    if parallel.kind == "data_parallel":
        return DataParallelReplica(model, world)
    return Replica(model) if world.size == 1 else DdpReplica(model, world, parallel)


class DataParallelReplica(Replica):
    """A model that nn.DataParallel copies to several GPUs of its only rank in each step.

    The loss is computed with nn.DataParallel's wrapper, whose forward pass splits a batch.

    Args:
        model: see `Replica`.
        world: of one rank.
    """

    in_threads = True

    def __init__(self, model: nn.Module, world: World) -> None:
        super().__init__(model)
        self._devices = list(world.devices)

    def build_loss_module(self, model: nn.Module, before: nn.Module | None = None) -> nn.Module:
        """See `Replica`."""
        return LossModule(AutocastDataParallel(model, device_ids=self._devices))


class DdpReplica(Replica):
    """A replica whose gradients DDP averages over all ranks. A model on several devices of this rank is one replica.

    `build_loss_module` wraps the loss in DDP, whose backward pass averages; `accumulating` is DDP's `no_sync`.

    Args:
        model: see `Replica`.
        world: of several ranks.
        parallel: of the configuration.
    """

    def __init__(self, model: nn.Module, world: TrainingWorld, parallel: Parallel) -> None:
        super().__init__(model)
        self._world = world
        self._parallel = parallel

    def build_loss_module(self, model: nn.Module, before: nn.Module | None = None) -> nn.Module:
        """See `Replica`; also sends rank zero's weights and buffers to all."""
        if isinstance(before, DistributedDataParallel):
            # its hooks on the parameters, so that another one can be built over them
            before._remove_autograd_hooks()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return replicate(LossModule(model), self._world, self._parallel)

    def accumulating(self, loss_module: nn.Module) -> Accumulating | None:
        """See `Replica`."""
        assert isinstance(loss_module, DistributedDataParallel)
        return loss_module.no_sync

    def fix_layout(self, loss_module: nn.Module, backward: Callable[[], None]) -> None:
        """Have DDP reach its final bucket layout before the first step; collective.

        DDP reduces its first backward with one layout and rebuilds it for all later ones. With three ranks or more the
        order of summation changes with it, and a resumed run, whose first step is a later one, would differ in the last
        bits. So every attempt starts with a throwaway backward, after which buffers, modes, frozen parameters,
        gradients and the random state are restored. In a world of two only a static graph needs it.
        """
        assert isinstance(loss_module, DistributedDataParallel)
        # DDP records a static graph in the first backward, which therefore has to send gradients; the first backward of
        # a step with accumulation doesn't.
        if not loss_module.static_graph and (self._world.size <= 2 or loss_module.find_unused_parameters):
            return
        with training_pass_undone(loss_module, self._world, compiled=is_any_compiled(loss_module)):
            # of a static graph, DDP rebuilds the buckets after the second backward: the first one records the graph
            for _ in range(2 if loss_module.static_graph else 1):
                backward()
        for parameter in loss_module.parameters():
            parameter.grad = None

    def send_buffers(self) -> None:
        """See `Replica`: each rank's batch norm saw its own samples since DDP last sent rank zero's buffers."""
        broadcast_tensors(self.model.buffers(), self._world)


def replicate(model: nn.Module, world: World, parallel: Parallel) -> DistributedDataParallel:
    """Wrap a module in DDP, which sends rank zero's weights and buffers to all; collective."""
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
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            replica.register_comm_hook(None, getattr(default_hooks, f"{parallel.gradient_compression}_compress_hook"))
    if world.device.type == "cuda" and world.backend == "gloo":
        replica.register_forward_hook(_wait_for_forward_pass)
    return replica


def broadcast_tensors(tensors: Iterable[Tensor], world: World) -> None:
    """Copy rank zero's parameters or buffers to all ranks, as DDP does for the model that it wraps; collective."""
    if world.size > 1:
        with torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor, 0)


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


def _wait_for_forward_pass(replica: DistributedDataParallel, *_: object) -> None:
    """Wait for the forward pass, so that its errors are raised here and not in gloo's threads.

    gloo's threads copy gradients to page-locked memory. After a GPU error they free it in a destructor, which ends the
    process (`hpctrain.attempt.lost_gpu`; torch 2.13, torch/csrc/distributed/c10d/ProcessGroupGlooCuda.cpp). The wait
    costs little, because gloo waits for the GPU in each exchange anyway.
    """
    if torch.is_grad_enabled() and replica.require_backward_grad_sync:
        torch.cuda.current_stream().synchronize()

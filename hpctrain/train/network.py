"""The model in its two roles: what is trained and saved, and what forward passes go through."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from hpctrain.config.root import Config
from hpctrain.distributed.compiler import compile_in_place
from hpctrain.distributed.replica import broadcast_weights, replicate, synchronise_batchnorm
from hpctrain.distributed.world import World
from hpctrain.tasks.task import Task
from hpctrain.train.build import build_model
from hpctrain.train.precision import (
    MASTER_TYPES,
    PURE_TYPES,
    MasterWeights,
    accept_fp32,
    choose_matmul_precision,
    order_channels_last,
    poor_fit,
)

log = logging.getLogger("hpctrain.train")


@dataclass(frozen=True, slots=True)
class Network:
    """One model, in most precisions in both roles.

    Attributes:
        module: whose weights are optimized, averaged and saved; no wrapper is around it.
        model: what the task calls in training: a replica, with what is called in evaluation inside of it (`inner`).
        master: between the two, where `module` isn't inside of `model`.
    """

    module: nn.Module
    model: nn.Module
    master: MasterWeights | None


def build_network(
    config: Config, task: Task, world: World, begin_with: Callable[[nn.Module], object] | None
) -> Network:
    """Build the model, put it on its devices, and dress it as configured; collective.

    The order matters: batch norms are replaced before anything holds them; the half copy is made on the device and in
    its layout, since a weight that moves afterwards is one that nobody brings up to date; what changes a forward comes
    before the compiler, which comes before DDP.

    Args:
        config: of the run.
        task: has a model where the configuration has none, and spreads it where a process has several devices.
        world: the ranks.
        begin_with: puts given weights into the model, on rank zero; the others get them from there.
    """
    trainer, kind = config.trainer, config.precision.kind
    choose_matmul_precision(kind)
    if world.is_rank_zero and (remark := poor_fit(kind, world.device)):
        log.warning(remark)
    module = build_model(config.model, task)
    if trainer.sync_batchnorm:
        module = synchronise_batchnorm(module)
    if begin_with is not None and world.is_rank_zero:
        begin_with(module)
    spreads = len(world.devices) > 1 and config.parallel.kind == "ddp"
    module = task.place(module, world.devices) if spreads else module.to(world.device)
    if trainer.channels_last:
        order_channels_last(module)
    master = None
    called = module
    if kind in PURE_TYPES:
        module.to(PURE_TYPES[kind])
        accept_fp32(module, PURE_TYPES[kind])
    elif kind in MASTER_TYPES:
        broadcast_weights(module, world)
        master = MasterWeights(module, MASTER_TYPES[kind])
        called = master.copy
        accept_fp32(called, MASTER_TYPES[kind])
    if trainer.activation_checkpointing:
        from hpctrain.train.recompute import recompute_activations

        recompute_activations(called, trainer.activation_checkpointing, compiled=trainer.compile)
    if trainer.compile:
        compile_in_place(called, trainer.compile_mode)
    return Network(module, replicate(called, world, config.parallel), master)

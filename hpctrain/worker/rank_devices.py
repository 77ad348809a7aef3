"""This rank's devices: what its configuration asks for, what torch finds, and what the other ranks have."""

from __future__ import annotations

import logging
import os
import socket

import torch
from torch._C._distributed_c10d import Store

from hpctrain.config.checks import refuse_without_gpu
from hpctrain.config.cluster import Slurm
from hpctrain.config.visible_gpus import VISIBLE_DEVICES, visible_gpus
from hpctrain.distributed.devices import RankDevices, choose_devices, require_compatible_devices
from hpctrain.errors import ConfigError, DeviceError
from hpctrain.phrases import counted
from hpctrain.worker.rank import Rank

log = logging.getLogger("hpctrain.train")


def choose_compatible_devices(rank: Rank, store: Store | None) -> tuple[torch.device, ...]:
    """Choose this rank's devices, and compare them with the other ranks'; collective.

    Args:
        rank: of this process.
        store: of the ranks; None in a world of one.

    Raises:
        ConfigError: the configuration, or this build of torch, doesn't fit the devices.
        DeviceError: a GPU is missing or doesn't answer, some ranks have none, or two have the same.
    """
    number = rank.environment.rank
    visible = {name: os.environ[name] for name in VISIBLE_DEVICES if name in os.environ}
    devices: tuple[torch.device, ...] = ()
    try:
        devices = choose_own_devices(rank)
        own = RankDevices.of(number, devices, visible)
    except DeviceError as error:
        if store is None:
            raise
        own = RankDevices(rank=number, host=socket.gethostname(), visible=visible, problem=str(error))
    if store is not None:
        require_compatible_devices(store, own, rank.environment.world_size, rank.config.parallel.backend)
    return devices


def choose_own_devices(rank: Rank) -> tuple[torch.device, ...]:
    """Choose this rank's devices: the GPUs that its configuration asks for, or the CPU if it asks for none.

    Raises:
        ConfigError: torch finds no GPU, and the configuration or this build of torch shows that none is to be had.
        DeviceError: torch finds no GPU, although the configuration requests GPUs, or the driver lists some.
    """
    config, cluster = rank.config, rank.config.cluster
    asked = cluster.gpus_per_node
    # a site without cgroups shows all GPUs to a SLURM job that requested none: leave them alone
    use_gpu = asked != 0 and not (asked is None and isinstance(cluster, Slurm))
    each = None if config.parallel.kind == "data_parallel" else cluster.gpus_per_process
    devices = choose_devices(rank.environment, each, use_gpu=use_gpu)
    if devices[0].type == "cuda":
        return devices
    if use_gpu:
        _refuse_missing_gpus(asked, is_rank_zero=rank.is_rank_zero)
    refuse_without_gpu(config, f"find out why torch finds no GPU on {socket.gethostname()} (nvidia-smi)")
    return devices


def _refuse_missing_gpus(asked: int | None, *, is_rank_zero: bool) -> None:
    """Raise if there should be a GPU where torch finds none."""
    host, shown = socket.gethostname(), visible_gpus(os.environ)
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if asked:
            problem = f"torch {torch.__version__} on {host} is built without CUDA"
            remedy = "install a build with CUDA (pytorch.org), or set it to 0 to train on the CPU"
            raise ConfigError("cluster.gpus_per_node", asked, problem, remedy)
        if shown and is_rank_zero:
            found = f"{host} has {counted(shown, 'GPU')}, but torch {torch.__version__} is built without CUDA"
            log.warning("%s: training on the CPU; install a build with CUDA or ROCm to use them", found)
    elif asked or shown:
        promise = f"cluster.gpus_per_node={asked}" if asked else f"the driver lists {counted(shown, 'GPU')}"
        raise DeviceError(
            f"torch finds no GPU on {host}, but {promise}{_driver_error()}: run nvidia-smi or rocm-smi there, or set "
            "cluster.gpus_per_node=0 to train on the CPU"
        )


def _driver_error() -> str:
    """What the driver says, in brackets; empty if it says nothing."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except Exception as error:  # whatever a broken driver raises is the answer
        return f" ({str(error).strip().partition(chr(10))[0]})"
    return ""

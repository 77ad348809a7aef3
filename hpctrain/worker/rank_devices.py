"""This rank's devices: what its configuration asks for, what torch finds, and what the other ranks have."""

from __future__ import annotations

import logging
import os
import re
import socket

import torch
from torch._C._distributed_c10d import Store

from hpctrain.config.checks import refuse_without_gpu
from hpctrain.config.cluster import Slurm
from hpctrain.config.visible_gpus import VISIBLE_DEVICES, visible_gpus
from hpctrain.errors import ConfigError, DeviceError, HpctrainError
from hpctrain.phrases import counted
from hpctrain.rank.devices import RankDevices, choose_devices, require_compatible_devices
from hpctrain.worker.rank import Rank

HIDDEN = re.compile(r"No CUDA GPUs are available|Found no NVIDIA driver|no CUDA-capable device is detected")
"""What torch says where a container or a job step has no GPUs, although the driver's list in /proc shows the node's."""

log = logging.getLogger("hpctrain.train")


def choose_compatible_devices(rank: Rank, store: Store | None) -> tuple[torch.device, ...]:
    """Choose this rank's devices, and compare them with the other ranks'; collective.

    Args:
        rank: of this process.
        store: of the ranks; None in a world of one.

    Raises:
        ConfigError: the configuration, or this build of torch, doesn't fit the devices.
        DeviceError: a GPU is missing or doesn't answer, some ranks have none, or two have the same.
        RendezvousError: a rank reported no devices in time.
    """
    number = rank.environment.rank
    visible = {name: os.environ[name] for name in VISIBLE_DEVICES if name in os.environ}
    own_error: HpctrainError | None = None
    devices: tuple[torch.device, ...] = ()
    try:
        devices = choose_own_devices(rank)
        own = RankDevices.of(number, devices, visible)
    except (ConfigError, DeviceError) as error:
        if store is None:
            raise
        # not before the others know: they would wait for this rank's devices
        own_error = error
        own = RankDevices(
            rank=number,
            host=socket.gethostname(),
            problem=str(error),
            machine_at_fault=isinstance(error, DeviceError),
        )
    if store is not None:
        try:
            require_compatible_devices(store, own, rank.environment.world_size, rank.config.parallel.backend)
        except DeviceError as error:
            raise own_error or error from None
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
    host = socket.gethostname()
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        without = f"torch {torch.__version__} on {host} is built without CUDA"
        if asked:
            remedy = "install a build with CUDA (pytorch.org), or set it to 0 to train on the CPU"
            raise ConfigError("cluster.gpus_per_node", asked, without, remedy)
        if is_rank_zero and (listed := visible_gpus(os.environ, build="cuda")):
            log.warning("%s has %s, but %s: training on the CPU", host, counted(listed, "GPU"), without)
        return
    listed, why = visible_gpus(os.environ) or 0, _driver_error()
    if not asked and (not listed or HIDDEN.search(why)):
        return
    promise = f"cluster.gpus_per_node={asked}" if asked else f"the driver lists {counted(listed, 'GPU')}"
    raise DeviceError(
        f"torch finds no GPU on {host}, but {promise}{why and f' ({why})'}: run nvidia-smi or rocm-smi there, or set "
        "cluster.gpus_per_node=0 to train on the CPU"
    )


def _driver_error() -> str:
    """What the driver says; empty if it says nothing."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except Exception as error:  # whatever a broken driver raises is the answer
        return str(error).strip().partition("\n")[0]
    return ""

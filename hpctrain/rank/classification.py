"""The error that ended a rank: whether it is the task's own, the machine's or another rank's, and what to change."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hpctrain.attempt.lost_gpu import DEVICE_CODE_ERROR, GPU_OUT_OF_MEMORY, GPU_UNUSABLE
from hpctrain.attempt.out_of_memory import memory_advice
from hpctrain.config.mesh import shares_and_stages
from hpctrain.config.resources import micro_batch_size_of, uses_cuda_graphs
from hpctrain.config.root import Config
from hpctrain.errors import (
    CheckpointUnlikeError,
    DeviceError,
    HpctrainError,
    RendezvousError,
    error_text,
)
from hpctrain.phrases import either
from hpctrain.run.file_system import limit_met
from hpctrain.run.reason import Reason

TIMED_OUT = re.compile(
    r"Timed out waiting \d+ ?ms|Timeout waiting for key|timed out after|wait timeout after|caused pair closure"
    r"|monitoredBarrier|collective operation timeout|before timing out",
    re.IGNORECASE,
)
"""Messages of torch's backends (gloo, the store, NCCL's watchdog) when another rank didn't arrive in time.

A collective that times out is a hang, since all its connections exist; one that breaks is a lost peer.
"""
PEER_LOST = re.compile(
    r"Connection (closed|reset|refused) by|Connection reset|Broken pipe"
    r"|recvValue failed|sendBytes failed|DistNetworkError|DistStoreError|Socket closed"
    # from one of gloo's sockets; "[enforce fail at ...]" means sizes that differ among ranks: the task's own mistake
    r"|\[\S*/gloo/transport/\S+:\d+\] |Gloo connectFullMesh failed"
    # "invalid" errors of NCCL are mistakes in the task or the configuration, and recur in every attempt; so do those
    # whose further lines name this rank's own GPU memory or code
    rf"|NCCL error( in: [^,\n]*,| \d+:|:)"
    rf"(?! invalid (usage|argument)|[\s\S]*({GPU_OUT_OF_MEMORY.pattern}|{DEVICE_CODE_ERROR.pattern}))"
    r"|unhandled system error|remote process exit(ed|ing)|unexpected exit of a remote peer"
    r"|NCCL communicator was aborted|NCCL operations have failed or timed out|NCCL timeout in"
    r"|retrieving ncclUniqueId from",
    re.IGNORECASE,
)
"""Messages of the same backends when another rank has died. A backend's name isn't enough: usage errors have it too."""
MACHINE = re.compile(rf"DataLoader worker \(pid.*(is killed by signal|exited unexpectedly)|{GPU_UNUSABLE.pattern}")
"""torch's messages about DataLoader workers that the system killed, such as for their memory, or about a broken GPU."""

NCCL_ERRORS = {
    "TIMEOUT": "NCCL timed out: another rank didn't join a collective; see the stacks and the logs of the other ranks",
    "REMOTE_ERROR": "NCCL reports that another rank failed; see the logs of the other ranks",
    "COMM_ERROR": "NCCL reports that it failed here, or lost another rank; see the logs of all ranks, and set "
    "cluster.env.NCCL_DEBUG=WARN to have NCCL print the cause",
}
"""What to report of each error of torch's NCCL backend (torch/csrc/distributed/c10d/Backend.hpp, ErrorType)."""
UNUSED_PARAMETERS = "parameters that were not used in producing loss"
"""In DDP's error at the second forward pass, when parameters had no gradient in the first."""
HOST_MEMORY = re.compile(
    r"^(_Array)?MemoryError\b|DefaultCPUAllocator: (can't|not enough)|std::bad_alloc|Cannot allocate memory"
)

NOT_CALLABLE = re.compile(r"'(Attached|Task)Log' object is not callable")
ONE_VALUE = "Expected more than 1 value per channel when training"
SECOND_BACKWARD = "Trying to backward through the graph a second time"
OF_TASKS = ("hpctrain.tasks.task", "hpctrain.tasks.log")
"""The modules of the base classes of tasks and their logs, which import torch."""
LOG_SCALARS = "call self.log.scalar(name, value), or return a mapping from loss: {'loss': loss, name: value}"
ATTRIBUTES_OF_LIGHTNING = {
    "log_dict": LOG_SCALARS,
    "current_epoch": "use self.position.epoch",
    "global_step": "use self.position.step",
    "device": "use the device of the batch's tensors",
    "hparams": "use attributes that __init__ sets",
    "logger": "use self.log",
    "optimizers": "choose optimizer=named, with a method of the task for each loss",
    "manual_backward": "return the loss: hpctrain calls backward()",
    "all_gather": "use hpctrain.parallel.all_gather.all_gather_with_grad",
}
"""Attributes of a LightningModule, and what does the same here."""


@dataclass(frozen=True, slots=True)
class Classification:
    """The meaning of an error for the rank that raised it.

    Attributes:
        reason: why the rank ended.
        blames_peer: whether the error points at another rank, whose own record names the cause.
    """

    reason: Reason
    blames_peer: bool = False


def classify(error: BaseException, world_size: int) -> Classification:
    """Classify an error that ended a rank, in a world of this size."""
    if isinstance(error, RendezvousError):
        # no code of the task has run yet: the cause is a node, the network, or a port that another program took
        return Classification(Reason.INFRASTRUCTURE, blames_peer=error.waited)
    if isinstance(error, DeviceError):
        reason = Reason.INFRASTRUCTURE if error.machine_at_fault else Reason.FAILED
        return Classification(reason, blames_peer=error.elsewhere)
    if isinstance(error, CheckpointUnlikeError):
        return Classification(Reason.INFRASTRUCTURE)
    # torch raises RuntimeErrors; other types with the same text are the task's, such as a download that timed out
    if not isinstance(error, RuntimeError):
        elsewhere = isinstance(error, HpctrainError) and error.elsewhere
        return Classification(Reason.FAILED, blames_peer=elsewhere)
    return classify_text(f"{type(error).__name__}: {error_text(error)}", world_size)


def classify_text(text: str, world_size: int) -> Classification:
    """Classify an error of torch by its text, in a world of this size."""
    if MACHINE.search(text):
        return Classification(Reason.INFRASTRUCTURE)
    if world_size > 1 and TIMED_OUT.search(text):
        return Classification(Reason.HANG, blames_peer=True)
    if world_size > 1 and PEER_LOST.search(text):
        return Classification(Reason.INFRASTRUCTURE, blames_peer=True)
    return Classification(Reason.FAILED)


def advice(error: BaseException, config: Config, world_size: int, local_world_size: int | None = None) -> str:
    """Return what to change, in one line; empty if the error isn't one of these, or no key is left to change.

    It gives none about a killed DataLoader worker: only the launcher can find out whether the kernel killed it for its
    memory, and gives the advice then.

    Args:
        error: that ended this rank.
        config: of the run.
        world_size: number of ranks.
        local_world_size: ranks of a node; None for all.
    """
    text = f"{type(error).__name__}: {error_text(error)}"
    if isinstance(error, OSError) and error.filename and (limit := limit_met(error, Path(str(error.filename)))):
        return limit
    if UNUSED_PARAMETERS in text and not config.parallel.find_unused_parameters:
        return (
            "some parameters did not contribute to the loss: set parallel.find_unused_parameters=true in a new run, or "
            "freeze them"
        )
    if GPU_OUT_OF_MEMORY.search(text):
        remedies = _memory_saving_settings(config, world_size, local_world_size or world_size)
        return f"out of GPU memory: {either(remedies)}" if remedies else ""
    if HOST_MEMORY.search(text):
        return f"out of memory: {memory_advice(config)}"
    if ONE_VALUE in text:
        return _about_batch_norm(config, world_size, local_world_size or world_size)
    return _about_the_task(error, text)


def _about_batch_norm(config: Config, world_size: int, local_world_size: int) -> str:
    trouble = "batch norm can't compute the variance of the single sample in this micro-batch"
    if _micro_batch_size(config, world_size, local_world_size)[0] == 1:
        return f"{trouble}: set trainer.micro_batch_size above 1"
    if config.data.drop_last:
        return ""
    return f"{trouble}, which the last step of an epoch may have: set data.drop_last=true, which leaves that step out"


def _about_the_task(error: BaseException, text: str) -> str:
    """Return what to change in the code of the task; empty if the error isn't one of those that are known."""
    if NOT_CALLABLE.search(text):
        return LOG_SCALARS
    if SECOND_BACKWARD in text:
        return "a loss must not call backward(), nor keep results of an earlier step without detach()"
    if isinstance(error, AttributeError) and any(base.__module__ in OF_TASKS for base in type(error.obj).__mro__):
        return ATTRIBUTES_OF_LIGHTNING.get(error.name or "", "")
    return ""


def _memory_saving_settings(config: Config, world_size: int, local_world_size: int) -> list[str]:
    """Return the settings that save GPU memory and aren't used yet."""
    trainer, settings = config.trainer, []
    size, pipeline_degree = _micro_batch_size(config, world_size, local_world_size)
    if size > 1:
        # a smaller micro-batch means accumulation, which CUDA graphs rule out
        also = "trainer.compile_mode=default and " if uses_cuda_graphs(config) else ""
        fit = " (`python -m hpctrain fit-batch` finds the largest)" if pipeline_degree == 1 else ""
        settings.append(f"set {also}trainer.micro_batch_size below {size}{fit}")
    if not trainer.activation_checkpointing:
        settings.append("set trainer.activation_checkpointing")
    if faster := config.precision.formats.faster:
        settings.append(f"use precision={faster}")
    return settings


def _micro_batch_size(config: Config, world_size: int, local_world_size: int) -> tuple[int, int]:
    """Return the samples of a full micro-batch, and the number of groups of ranks in the pipeline."""
    num_shares, pipeline_degree = shares_and_stages(config.parallel, world_size, local_world_size)
    return micro_batch_size_of(config, num_shares, pipeline_degree), pipeline_degree

"""Checks across groups: combinations that can't work, found before anything is written or submitted."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.config.batch import refuse_indivisible
from hpctrain.config.cluster import Slurm
from hpctrain.config.resources import resources_of
from hpctrain.config.root import Config
from hpctrain.config.task import missing_folder, refuse_without_extra
from hpctrain.errors import ConfigError

NEEDS_A_CLOSURE = "computes the loss several times per step by a closure, which this loop doesn't give"
"""What is wrong with torch.optim.LBFGS."""


def check(config: Config, environ: Mapping[str, str] = os.environ, *, world_size: int | None = None) -> None:
    """Refuse what can't work together.

    Args:
        config: values that are each fine.
        environ: this machine's environment, for the GPUs of a local run.
        world_size: ranks that already run; None: what the configuration asks for.

    Raises:
        ConfigError: one line for the first combination that can't work.
    """
    if config.nodes > 1 and not isinstance(config.cluster, Slurm) and world_size is None:
        raise ConfigError(
            "nodes", config.nodes, "needs a cluster, and cluster=local is one machine", "add cluster=slurm"
        )
    _check_length(config)
    if config.init_from is not None:
        _check_weights(config.init_from)
    for group in ("task", "model", "optimizer"):
        _check_target(group, getattr(config, group))
    refuse_without_extra(config.task)
    if (folder := missing_folder(config.task)) is not None and not isinstance(config.cluster, Slurm):
        raise ConfigError("task.data", folder, "is no folder", "name the one that holds the data")
    _check_parallel(config, world_size)
    resources = resources_of(config, environ)
    check_batch(config, world_size or resources.world_size)
    if resources.gpus_per_node == 0:
        slurm = isinstance(config.cluster, Slurm)
        refuse_without_gpu(config, "set cluster.gpus_per_node" if slurm else "run on a machine with a GPU")
    _check_shapes(config)


def _check_weights(path: str) -> None:
    if not path:
        # Path("") is the folder where the command is typed, which is there
        raise ConfigError("init_from", path, "is empty", "name a run, a checkpoint or a file of weights, or null")
    if not Path(path).exists():
        raise ConfigError("init_from", path, "is not there", "name a run, a checkpoint or a file of weights")
    if Path(path).suffix == ".safetensors" and importlib.machinery.PathFinder.find_spec("safetensors") is None:
        remedy = 'pip install "hpctrain[safetensors]"'
        raise ConfigError("init_from", path, "needs the package safetensors, which isn't installed", remedy)


def _check_length(config: Config) -> None:
    trainer = config.trainer
    if trainer.max_steps is None and trainer.max_epochs is None:
        raise ConfigError("trainer.max_steps", None, "with trainer.max_epochs=null a run never ends", "set one of them")


def _check_target(group: str, node: Any) -> None:
    key = f"{group}._target_"
    if not isinstance(node, dict):
        raise ConfigError(group, node, "is no group of keys", f"choose an option: {group}=NAME")
    target = node.get("_target_")
    if target is None:
        if group == "model":
            return
        raise ConfigError(key, None, "must name a class", f"set {key}=module.Class")
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")) or "." not in target:
        raise ConfigError(key, target, "is no import path", f"write {key}=module.Class")
    if target == "torch.optim.LBFGS":
        raise ConfigError(key, target, NEEDS_A_CLOSURE, "choose another class of torch.optim")
    top = target.split(".")[0]
    places = [str(Path.cwd()), *sys.path]
    # found, not imported: it may import torch, and this runs on a login node
    if top not in sys.modules and importlib.machinery.PathFinder.find_spec(top, places) is None:
        remedy = "type the command in the folder that holds it, or install it"
        raise ConfigError(key, target, f"there is no module {top}", remedy)


def _check_parallel(config: Config, world_size: int | None) -> None:
    """Refuse what nn.DataParallel, one process with several GPUs, can't be combined with."""
    if config.parallel.kind != "data_parallel":
        return
    processes = world_size or config.nodes * (config.cluster.processes_per_node or 1)
    if processes > 1:
        raise ConfigError(
            "parallel.kind",
            "data_parallel",
            f"is one process with several GPUs, but {processes} processes are asked for",
            "use parallel=ddp, which is faster",
        )
    for key in ("compile", "sync_batchnorm"):
        if getattr(config.trainer, key):
            problem = "can't be done with the threads of parallel=data_parallel"
            raise ConfigError(f"trainer.{key}", True, problem, "use parallel=ddp, which is faster")


def check_batch(config: Config, world_size: int) -> None:
    """Refuse a global batch that the ranks can't divide; see `refuse_indivisible`."""
    refuse_indivisible(config.trainer.global_batch_size, config.trainer.micro_batch_size, world_size)


def refuse_without_gpu(config: Config, remedy: str) -> None:
    """Refuse what a CPU can't do.

    Args:
        config: of a run without GPUs.
        remedy: how to get one.

    Raises:
        ConfigError: names the key that asks for it.
    """
    if config.trainer.sync_batchnorm:
        raise ConfigError("trainer.sync_batchnorm", True, "torch has no synchronised batch norm on a CPU", remedy)
    if config.precision.kind == "tf32":
        raise ConfigError("precision.kind", "tf32", "is a format of NVIDIA GPUs", f"{remedy}, or use precision=fp32")
    if config.parallel.kind == "data_parallel":
        raise ConfigError("parallel.kind", "data_parallel", "needs GPUs", f"{remedy}, or use parallel=ddp")
    if config.parallel.gradient_compression == "bf16":
        problem = "torch sends bf16 through NCCL alone, which needs GPUs"
        raise ConfigError("parallel.gradient_compression", "bf16", problem, f"{remedy}, or use fp16")
    if config.parallel.backend == "nccl":
        raise ConfigError("parallel.backend", "nccl", "needs GPUs", f"{remedy}, or use parallel.backend=gloo")


def warnings_of(config: Config) -> list[str]:
    """What works, but is probably not meant; one line each."""
    cluster, found = config.cluster, []
    if isinstance(cluster, Slurm) and (folder := missing_folder(config.task)) is not None:
        found.append(f"task.data={folder} is no folder on this machine: the nodes must have it")
    max_steps, warmup_steps = config.trainer.max_steps, config.schedule.warmup_steps
    if max_steps is not None and warmup_steps >= max_steps:
        found.append(f"schedule.warmup_steps={warmup_steps} never ends within trainer.max_steps={max_steps}")
    if isinstance(cluster, Slurm) and cluster.gpus_per_node is None and "gpu" in (cluster.partition or "").lower():
        asked = f"cluster.partition={cluster.partition} looks like a GPU partition, but no GPU is asked for"
        found.append(f"{asked}; set cluster.gpus_per_node=N, or 0 if this is meant")
    return found


def _check_shapes(config: Config) -> None:
    model, task = config.model, config.task
    if model["_target_"] == "hpctrain.models.gpt.GPT":
        if model["width"] % model["num_heads"]:
            raise ConfigError(
                "model.width",
                model["width"],
                f"is no multiple of model.num_heads={model['num_heads']}",
                "change either",
            )
        needed = task.get("context_length")
        if isinstance(needed, int) and needed > model["context_length"]:
            raise ConfigError(
                "task.context_length",
                needed,
                f"is longer than model.context_length={model['context_length']}",
                "raise that one as well",
            )

"""Checks across groups: find impossible combinations before anything is written or submitted."""

from __future__ import annotations

import contextlib
import importlib.util
import operator
import os
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from hpctrain.config.cluster import Slurm, check_container, check_mounted
from hpctrain.config.logger import FILE_STORE_REMEDY, FILE_STORE_VARIABLE, SERVICES
from hpctrain.config.optimizer import (
    ParameterOptions,
    entries_of,
    losses_of,
    named_optimizers,
    parameter_options,
    refuse_unfreezing,
)
from hpctrain.config.paths import check_run_directory, check_weights, is_folder
from hpctrain.config.precision import FORMATS
from hpctrain.config.program import USAGE, check_program, program_warnings
from hpctrain.config.resources import (
    check_division,
    check_gpu_request,
    check_node_counts,
    ranks_per_node,
    require_gpu_for_each_rank,
    resources_of,
)
from hpctrain.config.root import Config, ProgramConfig, RunConfig, flat
from hpctrain.config.target import check_targets, refuse_own_targets, require_own_targets
from hpctrain.config.task import EXTRAS
from hpctrain.config.task_checks import check_task, uncalled_methods
from hpctrain.errors import ConfigError

NEEDS_GPU = (
    ("trainer.sync_batchnorm", True, "torch synchronises batch norm on GPUs only", ""),
    *(
        ("precision.kind", formats.kind, "needs NVIDIA GPUs", f", or use precision={formats.without_nvidia}")
        for formats in FORMATS.values()
        if formats.without_nvidia
    ),
    ("parallel.kind", "data_parallel", "needs GPUs", ", or use parallel=ddp"),
    ("parallel.gradient_compression", "bf16", "needs GPUs: torch sends bf16 only through NCCL", ", or use fp16"),
    ("parallel.backend", "nccl", "needs GPUs", ", or use parallel.backend=gloo"),
    ("parallel.cpu_offload", True, "keeps in host memory what would be on a GPU", ", or leave it out"),
)
"""Key, value, why it needs a GPU, and what to use instead."""
FOLDER_TASKS = ("hpctrain.tasks.image_folder.ImageFolder", "hpctrain.tasks.tokens.Tokens")
"""Tasks that need the folder task.data."""
WHOLE_CALLS = "works on calls of the whole model, but with several losses a task calls parts of it"
"""Why some keys are refused with several turns."""


def check(
    config: RunConfig,
    environ: Mapping[str, str] = os.environ,
    *,
    world_size: int | None = None,
    local_world_size: int | None = None,
) -> None:
    """Check all groups of a training, or of a program, together.

    Args:
        config: each value is already checked by itself.
        environ: this machine's environment, for the GPUs of a local run.
        world_size: number of ranks that already run; None for what the configuration asks for.
        local_world_size: how many of them share a node; None if that isn't known.

    Raises:
        ConfigError: the first impossible combination.
    """
    if isinstance(config, ProgramConfig) and not config.run.command:
        raise ConfigError("run.command", "[]", "there is no program to run", USAGE)
    _check_run(config, world_size)
    if isinstance(config, ProgramConfig):
        check_program(config, environ)
    elif isinstance(config, Config):
        _check_training(config, environ, world_size, local_world_size)


def _check_training(
    config: Config, environ: Mapping[str, str], world_size: int | None, local_world_size: int | None
) -> None:
    slurm = isinstance(config.cluster, Slurm)
    if config.trainer.max_steps is None and config.trainer.max_epochs is None:
        raise ConfigError("trainer.max_steps", None, "the run would never end", "set it, or trainer.max_epochs")
    if config.init_from is not None:
        check_weights(config.init_from)
    if (writers := config.checkpoint.writers) > 1 and config.parallel.kind != "mesh":
        problem = "has no effect: only the ranks of parallel=mesh write side by side"
        raise ConfigError("checkpoint.writers", writers, problem, "leave it out, or use parallel=mesh")
    _check_services(config, environ)
    for group in ("task", "model", "optimizer", "schedule", "callbacks"):
        check_targets(group, getattr(config, group))
    _check_turns(config)
    check_task(config)
    target = str(config.task["_target_"])
    if (extra := EXTRAS.get(target.rpartition(".")[0])) is not None:
        _require_package("task._target_", target, *extra)
    if (folder := _missing_folder(config.task)) is not None and not slurm:
        raise ConfigError("task.data", folder, "is not a folder", "set it to the folder with the data")
    _check_parallel(config, world_size)
    resources = resources_of(config, environ)
    num_ranks = world_size or resources.world_size
    if slurm or num_ranks > 1:
        importers = "a job" if slurm else "other ranks"
        refuse_own_targets(config, f"is defined in this program, which {importers} can't import")
    require_own_targets(config)
    check_division(config, num_ranks, local_world_size or ranks_per_node(config, num_ranks, environ))
    check_node_counts(config, resources)
    require_gpu_for_each_rank(config, resources, environ)
    if resources.gpus_per_node == 0:
        refuse_without_gpu(config, "set cluster.gpus_per_node" if slurm else "run on a machine with a GPU")
    _check_shapes(config)


def _missing_folder(node: Mapping[str, Any]) -> Path | None:
    """Return the folder that a task reads if this machine doesn't have it; the nodes of a cluster may.

    Raises:
        ConfigError: it can't be read here.
    """
    if node["_target_"] not in FOLDER_TASKS:
        return None
    folder = Path(str(node["data"]))
    return None if is_folder("task.data", folder) else folder


def _require_package(key: str, value: object, package: str, extra: str) -> None:
    # found, not imported: keras takes seconds to import
    if importlib.util.find_spec(package) is None:
        problem = f"needs the package {package}, which isn't installed"
        raise ConfigError(key, value, problem, f'pip install "hpctrain[{extra}]"')


def _check_services(config: Config, environ: Mapping[str, str]) -> None:
    enabled = config.logger.enabled_services
    for name in enabled:
        _require_package(f"logger.{name}.enabled", "true", name, name)
    if config.logger.mlflow.enabled:
        _check_mlflow_server(config, environ)
    variables = [f"cluster.env.{name}" for name in config.cluster.env]
    if isinstance(config.cluster, Slurm):
        variables += [f"cluster.container.env.{name}" for name in config.cluster.container.env]
    secrets = {name for group in SERVICES.values() for name in group.secrets}
    for key in variables if enabled else ():
        if key.rpartition(".")[2] in secrets:
            problem = "would be in config.yaml, which others may read"
            raise ConfigError(key, "***", problem, "export it where you submit, or use ~/.netrc")


def _check_mlflow_server(config: Config, environ: Mapping[str, str]) -> None:
    key = "logger.mlflow.tracking_uri"
    address = config.logger.mlflow.tracking_uri or environ.get("MLFLOW_TRACKING_URI")
    if not address:
        remedy = "set it to an address, such as http://login1:5000, or export MLFLOW_TRACKING_URI"
        raise ConfigError(key, None, "MLflow needs a server or a database", remedy)
    names_folder = address.startswith("file:") or (":" not in address and address != "databricks")
    in_container = config.cluster.container.env if isinstance(config.cluster, Slurm) else {}
    allowed = {**environ, **config.cluster.env, **in_container}.get(FILE_STORE_VARIABLE, "")
    if names_folder and allowed.lower() not in ("true", "1") and _mlflow_refuses_folders():
        raise ConfigError(key, address, "is a folder, which MLflow refuses since version 3.13", FILE_STORE_REMEDY)


def _mlflow_refuses_folders() -> bool:
    """Whether the installed MLflow refuses to store runs in a folder, as it does since version 3.13."""
    for name in ("mlflow-skinny", "mlflow"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return tuple(map(int, metadata.version(name).split(".")[:2])) >= (3, 13)
    return True


def _check_parallel(config: Config, world_size: int | None) -> None:
    """Refuse what doesn't work with nn.DataParallel, which is one process with several GPUs."""
    if config.parallel.kind != "data_parallel":
        return
    remedy = "use parallel=ddp, which is faster"
    processes = world_size or config.nodes * (config.cluster.processes_per_node or 1)
    if processes > 1:
        problem = f"runs one process with several GPUs, but {processes} processes are requested"
        raise ConfigError("parallel.kind", "data_parallel", problem, remedy)
    for key in ("compile", "sync_batchnorm", "activation_checkpointing"):
        if value := getattr(config.trainer, key):
            problem = "doesn't work with the threads of parallel=data_parallel"
            raise ConfigError(f"trainer.{key}", value, problem, remedy)


def refuse_without_gpu(config: Config, remedy: str) -> None:
    """Refuse what needs a GPU.

    Args:
        config: of a run without GPUs.
        remedy: how to get one.

    Raises:
        ConfigError: a key asks for something that needs a GPU.
    """
    for key, value, problem, alternative in NEEDS_GPU:
        if operator.attrgetter(key)(config) == value:
            raise ConfigError(key, value, problem, f"{remedy}{alternative}")


def warnings_of(config: RunConfig) -> list[str]:
    """Return a line on each setting that works, but is probably a mistake."""
    lines = program_warnings(config) if isinstance(config, ProgramConfig) else []
    if isinstance(config, Config):
        lines = _warnings_of_training(config)
    cluster = config.cluster
    if isinstance(cluster, Slurm) and cluster.node_gpus is None and "gpu" in (cluster.partition or "").lower():
        problem = f"cluster.partition={cluster.partition} looks like a GPU partition, but the run requests no GPU"
        lines.append(f"{problem}; set cluster.gpus_per_node=N, or 0 if this is intended")
    return lines


def _warnings_of_training(config: Config) -> list[str]:
    lines = []
    if isinstance(config.cluster, Slurm) and (folder := _missing_folder(config.task)) is not None:
        lines.append(f"task.data={folder} is not a folder on this machine: it must exist on the nodes")
    max_steps, warmup_steps = config.trainer.max_steps, getattr(config.schedule, "warmup_steps", 0)
    if max_steps is not None and warmup_steps >= max_steps:
        lines.append(f"schedule.warmup_steps={warmup_steps} does not end before trainer.max_steps={max_steps}")
    pause_at = config.trainer.pause_at_step
    if max_steps is not None and pause_at is not None and pause_at >= max_steps:
        lines.append(f"trainer.pause_at_step={pause_at} does not come before trainer.max_steps={max_steps}: no pause")
    return lines + _without_effect(config) + uncalled_methods(config)


def _without_effect(config: Config) -> list[str]:
    """Return a line on each key of the optimizers that changes nothing in this run."""
    lines, bounds = [], {"step": config.trainer.max_steps, "epoch": config.trainer.max_epochs}
    for optimizer in named_optimizers(config.optimizer):
        max_steps, key, pace = config.trainer.max_steps, optimizer.key, optimizer.every_steps
        if max_steps is not None and pace > max_steps:
            lines.append(f"{key}.every_steps={pace} is more than trainer.max_steps={max_steps}: it never steps")
        options = parameter_options(optimizer.node)
        module = options.layer_decay_module
        if options.layer_decay is None and module != ParameterOptions().layer_decay_module:
            lines.append(f"{key}.layer_decay_module={module} has no effect without {key}.layer_decay")
        for entry in entries_of(key, optimizer.node):
            for unit, bound in bounds.items():
                begin = getattr(entry, f"unfreeze_at_{unit}")
                if begin is not None and bound is not None and begin >= bound:
                    setting = f"{entry.key}.unfreeze_at_{unit}={begin:g}"
                    lines.append(f"{setting} does not come before trainer.max_{unit}s={bound}: it is never trained")
    return lines


def _check_shapes(config: Config) -> None:
    model, task = config.model, config.task
    if model["_target_"] == "hpctrain.models.gpt.GPT":
        if model["width"] % model["num_heads"]:
            problem = f"is not a multiple of model.num_heads={model['num_heads']}"
            raise ConfigError("model.width", model["width"], problem, "change one of them")
        length = task.get("context_length")
        if isinstance(length, int) and length > model["context_length"]:
            problem = f"is longer than model.context_length={model['context_length']}"
            raise ConfigError("task.context_length", length, problem, "raise that too")


def _check_run(config: RunConfig, world_size: int | None) -> None:
    """Check the texts, the run directory and the machines of a run."""
    slurm = isinstance(config.cluster, Slurm)
    for key, value in flat(config).items():
        _check_text(key, value)
    if slurm or config.run_dir is not None:
        check_run_directory(config.run_dir or "runs", in_batch_script=slurm)
    if config.nodes > 1 and not slurm and world_size is None:
        problem = "needs a cluster, but cluster=local is one machine"
        raise ConfigError("nodes", config.nodes, problem, "add cluster=slurm")
    if isinstance(config.cluster, Slurm) and world_size is None:
        container = config.cluster.container
        check_container(container, config.cluster.srun_args, resources_of(config).processes_per_node)
        check_gpu_request(config)
        check_mounted(container, "run_dir", str(Path(config.run_dir or "runs").absolute()))


def _check_text(key: str, value: object) -> None:
    """Refuse texts that can't be stored in config.yaml, or passed to another program."""
    for text in value if isinstance(value, list) else [value]:
        # a lone surrogate is how Python represents a byte of the command line that isn't UTF-8
        if isinstance(text, str) and (match := re.search(r"[\x00\ud800-\udfff]", text)) is not None:
            kind = "a NUL character" if match[0] == "\0" else "a byte that is not UTF-8"
            raise ConfigError(key, ascii(text), f"contains {kind}", "correct it")


def _check_turns(config: Config) -> None:
    """Check the losses of named optimizers, and groups that are unfrozen."""
    optimizers = named_optimizers(config.optimizer)
    if len(losses_of(optimizers)) > 1:
        if (formats := config.precision.formats).has_half_weights:
            remedy = f"use precision={formats.by_autocast}"
            raise ConfigError("precision.kind", formats.kind, WHOLE_CALLS, remedy)
        if (mode := config.trainer.compile_mode) != "default":
            problem = (
                "doesn't work with several losses: it uses CUDA graphs, in which a second call of a part of the model "
                "overwrites the result of the first"
            )
            raise ConfigError("trainer.compile_mode", mode, problem, "set it to default")
        if config.parallel.kind == "data_parallel":
            raise ConfigError("parallel.kind", "data_parallel", WHOLE_CALLS, "use parallel=ddp")
    if config.trainer.compile:
        problem = "doesn't work with trainer.compile=true: the model would have to be compiled again"
        refuse_unfreezing(optimizers, problem, "set one of them")

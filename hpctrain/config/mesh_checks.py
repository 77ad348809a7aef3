"""Checks of a run whose ranks shard the model: what doesn't work with a mesh is refused before anything is written."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

from hpctrain.config.mesh import MeshShape
from hpctrain.config.named_optimizers import losses_of, named_optimizers
from hpctrain.config.parallel import Parallel
from hpctrain.config.parameter_groups import entries_of
from hpctrain.config.plan_check import PIPELINE, TENSOR_PARALLEL, require_plan
from hpctrain.config.precision import FORMATS
from hpctrain.config.root import Config
from hpctrain.errors import ConfigError
from hpctrain.phrases import counted

REFUSED: tuple[tuple[str, Callable[[object], bool], str, str], ...] = (
    *(
        (
            "precision.kind",
            partial(operator.eq, formats.kind),
            "keeps a half copy next to the fp32 weights, as parallel=mesh does by itself",
            f"use precision={formats.by_autocast}",
        )
        for formats in FORMATS.values()
        if formats.copy
    ),
    ("trainer.channels_last", bool, "reorders weights, which parallel=mesh cuts into shards", "set it to false"),
    (
        "trainer.compile_mode",
        lambda mode: mode != "default",
        "uses CUDA graphs, in which the weights that parallel=mesh gathers have no fixed place",
        "set it to default",
    ),
    (
        "cluster.gpus_per_process",
        lambda number: number != 1,
        "spreads a model over the GPUs of a process, and parallel=mesh has one GPU per process",
        "set it to 1",
    ),
    (
        "checkpoint.safetensors",
        bool,
        "needs the whole model in one process, which parallel=mesh avoids",
        "set it to false, and use `python -m hpctrain export RUN` afterwards",
    ),
)
"""Key, the values that don't work with a mesh, why, and what to do instead."""
GPT = "hpctrain.models.gpt.GPT"
MUON = "torch.optim.Muon"


def check_mesh(config: Config, mesh: MeshShape | None) -> None:
    """Check the mesh of a training, if it has one.

    Args:
        config: of the training.
        mesh: of its ranks; None without one.

    Raises:
        ConfigError: a key doesn't work with a mesh, or with this one.
    """
    if mesh is None:
        return
    _check_stages(config.parallel, mesh.pipeline)
    _check_cpu_offload(config.parallel, mesh.num_ranks)
    for key, is_refused, problem, remedy in REFUSED:
        value = operator.attrgetter(key)(config)
        if is_refused(value):
            raise ConfigError(key, value, problem, remedy)
    if "average_weights" in config.callbacks:
        problem = "averages whole weights on one rank, which parallel=mesh avoids"
        raise ConfigError("callbacks.average_weights", "...", problem, "use trainer.ema_decay")
    optimizers = named_optimizers(config.optimizer)
    if len(losses_of(optimizers)) > 1:
        problem = "doesn't work with several losses: gradients are computed for all weights that a mesh gathers"
        raise ConfigError("parallel.kind", "mesh", problem, "use parallel=ddp")
    if mesh.pipeline > 1:
        _check_pipeline(config, mesh.pipeline)
    if mesh.tensor > 1:
        _check_tensor_parallel(config, mesh.tensor)
    for each in optimizers:
        for entry in entries_of(each.key, each.node):
            for name in ("unfreeze_at_step", "unfreeze_at_epoch"):
                if (value := getattr(entry, name)) is not None:
                    problem = "doesn't work with parallel=mesh: what is trained is fixed once the model is sharded"
                    raise ConfigError(f"{entry.key}.{name}", value, problem, "leave it out, or use parallel=ddp")


def _check_cpu_offload(parallel: Parallel, num_ranks: int) -> None:
    """Refuse shards in host memory of a single rank, which trains without a mesh."""
    if parallel.cpu_offload and num_ranks == 1:
        problem = "has no effect with 1 rank, which shards nothing"
        raise ConfigError("parallel.cpu_offload", True, problem, "use 2 ranks or more, or leave it out")


def refuse_pipeline(parallel: Parallel) -> None:
    """Refuse a pipeline where there is a single rank, as in `fit-batch`.

    Raises:
        ConfigError: the pipeline degree isn't 1.
    """
    if parallel.pipeline_degree != 1:
        problem = "passes activations on to other ranks, which fit-batch doesn't have"
        remedy = "try parallel=fsdp with the ranks of one replica, which takes about as much memory"
        raise ConfigError("parallel.pipeline_degree", parallel.pipeline_degree, problem, remedy)


def _check_stages(parallel: Parallel, degree: int) -> None:
    """Refuse keys of a pipeline without one, and another number of stages than it has."""
    num_stages = degree * parallel.stages_per_rank
    keys: tuple[tuple[str, object, bool], ...] = (
        ("parallel.stages_per_rank", parallel.stages_per_rank, parallel.stages_per_rank > 1),
        ("parallel.stages", parallel.stages, bool(parallel.stages)),
    )
    for key, value, is_set in keys:
        if degree == 1 and is_set:
            problem = "has no effect with parallel.pipeline_degree=1"
            raise ConfigError(key, value, problem, "leave it out, or use parallel=pp with several ranks")
    if parallel.stages and len(parallel.stages) != num_stages - 1:
        stages = f"parallel.pipeline_degree={degree} with parallel.stages_per_rank={parallel.stages_per_rank}"
        problem = f"begins {counted(len(parallel.stages) + 1, 'stage')}, and {stages} has {num_stages}"
        remedy = f"name the {num_stages - 1} modules with which the second stage and each further one begins"
        raise ConfigError("parallel.stages", parallel.stages, problem, remedy)


def _check_pipeline(config: Config, degree: int) -> None:
    """Refuse what doesn't work with a pipeline."""
    if "log_weights" in config.callbacks:
        problem = "logs weights on rank zero, which has only the last stage of a pipeline"
        raise ConfigError("callbacks.log_weights", "...", problem, "leave it out")
    require_plan(config, PIPELINE, degree)


def _check_tensor_parallel(config: Config, degree: int) -> None:
    """Refuse what doesn't work if several ranks compute each layer together."""
    for each in named_optimizers(config.optimizer):
        if (target := each.node["_target_"]) == MUON:
            problem = "needs whole matrices, and with parallel.tensor_degree above 1 a rank holds parts of them"
            raise ConfigError(f"{each.key}._target_", target, problem, "use optimizer=adamw, or parallel=fsdp")
    model = config.model
    if model["_target_"] == GPT and model["num_heads"] % degree:
        problem = f"doesn't divide model.num_heads={model['num_heads']}"
        fitting = [str(number) for number in range(1, degree + 1) if model["num_heads"] % number == 0]
        raise ConfigError("parallel.tensor_degree", degree, problem, f"use one of {', '.join(fitting)}")
    require_plan(config, TENSOR_PARALLEL, degree)

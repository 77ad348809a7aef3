"""The resources of a run: nodes, processes and GPUs, from the configuration and, for a local run, this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.config.cluster import Slurm
from hpctrain.config.root import Config, ProgramConfig, RunConfig
from hpctrain.config.visible_gpus import installed_build, visible_gpus
from hpctrain.errors import ConfigError
from hpctrain.phrases import counted

SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
"""The variable by which newer versions of NCCL let ranks share a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a run requests; derived once, and passed down.

    Attributes:
        num_nodes: without spare nodes.
        processes_per_node: that hpctrain starts.
        gpus_per_node: of each node; None if this machine's can't be counted: each rank asks torch, which then decides.
        cpus_per_process: CPU cores for each process; None for the scheduler's default.
        spawned_per_node: processes that a program with run.processes=node is to start on each node; None for others.
    """

    num_nodes: int
    processes_per_node: int
    gpus_per_node: int | None
    cpus_per_process: int | None
    spawned_per_node: int | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.num_nodes * self.processes_per_node


def ranks_per_node(config: Config, num_ranks: int, environ: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks share a node in a training with another number of ranks than the configuration asks for.

    That is `cluster.processes_per_node`; where it isn't set, nothing is known of the nodes, and all ranks are on one.

    Args:
        config: of the training.
        num_ranks: of the training.
        environ: this machine's environment, for the GPUs of a local run.

    Raises:
        ConfigError: a degree of parallel=mesh is that number, and it isn't known.
    """
    resources = resources_of(config, environ)
    if num_ranks == resources.world_size:
        return resources.processes_per_node
    if config.cluster.processes_per_node is not None:
        return config.cluster.processes_per_node
    if config.parallel.kind == "mesh":
        for key in ("tensor_degree", "shard_degree"):
            if getattr(config.parallel, key) is None:
                problem = f"is the number of ranks of a node, which isn't known for {counted(num_ranks, 'rank')}"
                remedy = "set it to that number, or set cluster.processes_per_node"
                raise ConfigError(f"parallel.{key}", None, problem, remedy)
    return num_ranks


def resources_of(config: RunConfig, environ: Mapping[str, str] = os.environ) -> Resources:
    """Return what the configuration requests, with the defaults filled in.

    Raises:
        ConfigError: more GPUs than this machine has, or GPUs that the processes can't share evenly.
    """
    cluster = config.cluster
    build = "any" if isinstance(config, ProgramConfig) else None
    here = 0 if isinstance(cluster, Slurm) else visible_gpus(environ, build=build)
    gpus = here if cluster.gpus_per_node is None else cluster.gpus_per_node
    if not isinstance(cluster, Slurm) and gpus is not None and here is not None and gpus > here:
        if here:
            problem, remedy = f"this machine has only {counted(here, 'visible GPU')}", f"set it to {here} or less"
        else:
            cannot = "the installed torch is built without CUDA" if build is None and installed_build() == "cpu" else ""
            problem = cannot or "this machine has no visible GPU"
            remedy = f"leave it out, with cluster.processes_per_node={gpus} for as many ranks on the CPU"
        raise ConfigError("cluster.gpus_per_node", gpus, problem, remedy)
    if isinstance(config, Config) and config.parallel.kind == "data_parallel":
        processes = 1
    elif cluster.processes_per_node is not None:
        processes = cluster.processes_per_node
    elif gpus is None:
        processes = 1
    elif gpus % cluster.gpus_per_process:
        problem = f"doesn't divide the {counted(gpus, 'GPU')} of a node"
        remedy = "choose a divisor of cluster.gpus_per_node"
        raise ConfigError("cluster.gpus_per_process", cluster.gpus_per_process, problem, remedy)
    else:
        processes = max(1, gpus // cluster.gpus_per_process)
    if isinstance(config, ProgramConfig) and config.run.processes == "node":
        cores = cluster.cpus_per_process
        return Resources(
            num_nodes=config.nodes,
            processes_per_node=1,
            gpus_per_node=gpus,
            cpus_per_process=None if cores is None else cores * processes,
            spawned_per_node=processes,
        )
    return Resources(
        num_nodes=config.nodes,
        processes_per_node=processes,
        gpus_per_node=gpus,
        cpus_per_process=cluster.cpus_per_process,
    )


def require_gpu_for_each_rank(config: Config, resources: Resources, environ: Mapping[str, str]) -> None:
    """Refuse more ranks than GPUs on a node, unless gloo connects them.

    Args:
        config: of a training.
        resources: that it requests.
        environ: of this process.

    Raises:
        ConfigError: NCCL would find two ranks on one GPU.
    """
    processes, gpus = resources.processes_per_node, resources.gpus_per_node
    if not gpus or processes == 1 or config.parallel.backend == "gloo":
        return
    if {**environ, **config.cluster.env}.get(SHARING):
        return
    each = config.cluster.gpus_per_process
    if processes * each <= gpus:
        return
    problem = (
        f"{processes} processes with {counted(each, 'GPU')} each need {processes * each} GPUs per node, but a node has "
        f"{gpus}, and with NCCL no two ranks may share a GPU"
    )
    fitting = gpus // each
    remedy = f"set it to {fitting}, or add parallel.backend=gloo" if fitting else "set cluster.gpus_per_process=1"
    raise ConfigError("cluster.processes_per_node", processes, problem, remedy)

"""The resources of a run, nodes, processes and GPUs, and how its ranks divide the samples of a step.

They follow from the configuration and, for a local run, from this machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.config.cluster import MAX_NODES, Slurm
from hpctrain.config.mesh import check_mesh, mesh_shape, shares_and_stages
from hpctrain.config.root import Config, ProgramConfig, RunConfig
from hpctrain.config.visible_gpus import installed_build, visible_gpus
from hpctrain.errors import ConfigError
from hpctrain.phrases import counted

SHARED_GPU_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
"""The variable by which newer versions of NCCL let ranks share a GPU."""
PIECES_PER_STAGE = 4
"""Micro-batches for each place in a pipeline, if a share has so many samples: ranks then wait for less than a fifth of
the time."""
SHOWN = 5
"""How many process counts the message on an indivisible batch suggests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Nodes, processes, GPUs and cores that a run requests; derived once, and passed down.

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
    present = 0 if isinstance(cluster, Slurm) else visible_gpus(environ, build=build)
    gpus = present if cluster.node_gpus is None else cluster.node_gpus
    if not isinstance(cluster, Slurm) and gpus is not None and present is not None and gpus > present:
        if present:
            problem, remedy = f"this machine has only {counted(present, 'visible GPU')}", f"set it to {present} or less"
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
    cores = cluster.cpus_per_process
    spawned = None
    if isinstance(config, ProgramConfig) and config.run.processes == "node":
        cores = None if cores is None else cores * processes
        spawned = processes
        processes = 1
    return Resources(
        num_nodes=config.nodes,
        processes_per_node=processes,
        gpus_per_node=gpus,
        cpus_per_process=cores,
        spawned_per_node=spawned,
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
    if {**environ, **config.cluster.env}.get(SHARED_GPU_VARIABLE):
        return
    per_process = config.cluster.gpus_per_process
    if processes * per_process <= gpus:
        return
    problem = (
        f"{processes} processes with {counted(per_process, 'GPU')} each need {processes * per_process} GPUs per node, "
        f"but a node has {gpus}, and with NCCL no two ranks may share a GPU"
    )
    fitting = gpus // per_process
    remedy = f"set it to {fitting}, or add parallel.backend=gloo" if fitting else "set cluster.gpus_per_process=1"
    raise ConfigError("cluster.processes_per_node", processes, problem, remedy)


def check_gpu_request(config: RunConfig) -> None:
    """Refuse a form in which sbatch can't be asked for the GPUs of a run.

    Raises:
        ConfigError: see `GpuRequest.check`.
    """
    cluster = config.cluster
    if isinstance(cluster, Slurm):
        has_min_nodes = cluster.min_nodes not in (None, config.nodes)
        cluster.gpus.check(resources_of(config).processes_per_node, has_min_nodes=has_min_nodes)


def micro_batch_size_of(config: Config, world_size: int, pipeline_degree: int = 1) -> int:
    """Return the samples per rank and forward pass.

    Where trainer.micro_batch_size is null, that is a rank's whole share of a step. With a pipeline, the share is cut
    into at least four equal pieces for each place in the pipeline, of one sample each if it is smaller. A run that
    continues on fewer nodes (cluster.min_nodes) has larger shares; they are cut into equal pieces that are no larger
    than those on all nodes, so that they fit into memory.

    Args:
        config: of the run.
        world_size: number of ranks, or of groups of ranks that have the same samples; divides the global batch.
        pipeline_degree: of the mesh of these ranks.
    """
    trainer = config.trainer
    if trainer.micro_batch_size is not None:
        return trainer.micro_batch_size
    share = trainer.global_batch_size // world_size
    size = _piece(share, pipeline_degree)
    if not isinstance(config.cluster, Slurm) or config.cluster.min_nodes is None:
        return size
    resources = resources_of(config)
    num_shares, degree = shares_and_stages(config.parallel, resources.world_size, resources.processes_per_node)
    return _piece(share, pipeline_degree, largest=_piece(max(1, trainer.global_batch_size // num_shares), degree))


def _piece(share: int, pipeline_degree: int, largest: int | None = None) -> int:
    """Return the size of equal pieces of a share: as large as it may be."""
    fewest = min(share, PIECES_PER_STAGE * pipeline_degree) if pipeline_degree > 1 else 1
    bound = min(share // fewest, largest or share)
    return next(size for size in range(bound, 0, -1) if share % size == 0)


def check_division(config: Config, world_size: int, local_world_size: int) -> None:
    """Refuse a model or a global batch that the ranks can't divide among each other.

    Args:
        config: of the run.
        world_size: number of ranks.
        local_world_size: ranks of a node.

    Raises:
        ConfigError: as `mesh_shape`, `check_mesh` and `check_batch`.
    """
    mesh = mesh_shape(config.parallel, world_size, local_world_size)
    check_mesh(config, mesh)
    num_shares = world_size if mesh is None else mesh.data_parallel_size
    check_batch(config, num_shares, world_size // num_shares)


def check_batch(config: Config, world_size: int, ranks_each: int = 1) -> None:
    """Refuse a global batch that can't be divided among the ranks, or whose accumulation the compiler breaks.

    Args:
        config: of the run.
        world_size: number of ranks, or of groups of ranks that compute layers together.
        ranks_each: ranks of such a group.

    Raises:
        ConfigError: see `check_divisible`; or a step has several micro-batches, and the compiler uses CUDA graphs.
    """
    trainer = config.trainer
    check_divisible(trainer.global_batch_size, trainer.micro_batch_size, world_size, ranks_each)
    # also without a GPU, where there are no graphs: a configuration that is tried on a CPU must not fail on a GPU
    per_rank = trainer.global_batch_size // world_size
    accumulation = per_rank // micro_batch_size_of(config, world_size)
    if accumulation > 1 and uses_cuda_graphs(config):
        problem = (
            f"uses CUDA graphs, which overwrite the gradients of earlier micro-batches, and a step has {accumulation} "
            "micro-batches"
        )
        remedy = (
            f"set trainer.micro_batch_size={per_rank}, a rank's whole share of a step, or trainer.compile_mode=default"
        )
        raise ConfigError("trainer.compile_mode", trainer.compile_mode, problem, remedy)


def uses_cuda_graphs(config: Config) -> bool:
    """Whether the compiler records CUDA graphs on a GPU; such a training can't accumulate gradients.

    The gradients that a graph computes stay in the graph's memory, which its next replay overwrites. Depending on the
    model, the sum over the micro-batches is wrong, or torch raises an error (pytorch issues 96693 and 169545).
    """
    return config.trainer.compile_mode != "default"


def counted_shares(world_size: int, ranks_each: int) -> str:
    """Count what has samples of its own: ranks, or groups of ranks that compute layers together."""
    if ranks_each == 1:
        return counted(world_size, "rank")
    return f"{counted(world_size, 'group')} of {counted(ranks_each, 'rank')}"


def check_divisible(global_batch_size: int, micro_batch_size: int | None, world_size: int, ranks_each: int = 1) -> None:
    """Check that the global batch can be divided among the ranks.

    Args:
        global_batch_size: samples per step, over all ranks.
        micro_batch_size: samples per rank and forward; None for all samples of a rank.
        world_size: number of ranks, or of groups of ranks that have the same samples.
        ranks_each: ranks of such a group.

    Raises:
        ConfigError: it can't; the message suggests batch sizes for this world size, and world sizes for this batch.
    """
    per_window = world_size * (micro_batch_size or 1)
    if global_batch_size % per_window == 0:
        return
    lower = global_batch_size // per_window * per_window
    sizes = [size for size in (lower, lower + per_window) if size > 0]
    among = counted_shares(world_size, ranks_each)
    if ranks_each > 1:
        among = f"{among} that share samples{',' * bool(micro_batch_size)}"
    micro_batches = f" with micro-batches of {micro_batch_size}" if micro_batch_size else ""
    pieces, remainder = divmod(global_batch_size, micro_batch_size or 1)
    # a bound, since a batch may have billions of samples
    fitting = [] if remainder else [n for n in range(1, min(pieces, MAX_NODES) + 1) if pieces % n == 0]
    names = [str(n * ranks_each) for n in sorted(sorted(fitting, key=lambda n: abs(n - world_size))[:SHOWN])]
    noun = "process" if names == ["1"] else "processes"
    worlds = f", or run {' or '.join(filter(None, [', '.join(names[:-1]), names[-1]]))} {noun}" if names else ""
    problem = f"cannot be divided among {among}{micro_batches}"
    remedy = f"set it to {' or '.join(map(str, sizes))}{worlds}"
    raise ConfigError("trainer.global_batch_size", global_batch_size, problem, remedy)


def node_counts(config: RunConfig, resources: Resources) -> tuple[int, ...]:
    """Return the numbers of nodes on which the run may train, largest first; the first is `nodes`.

    A training can use a number of nodes if the ranks on them divide the global batch, and fit the degrees of
    parallel=mesh. A program copes with any number. The global batch stays as it is, because the learning rate fits it.
    SLURM doesn't know these numbers: if it gives three nodes and the ranks can use two, one is idle.

    Args:
        config: of the run; works with all of its nodes.
        resources: of the run.
    """
    least = _min_nodes(config)
    fewer = range(resources.num_nodes - 1, least - 1, -1) if least is not None else ()
    return (resources.num_nodes, *(number for number in fewer if _node_count_error(config, resources, number) is None))


def check_node_counts(config: RunConfig, resources: Resources) -> None:
    """Check that cluster.min_nodes lets a run continue on fewer nodes, if it is set.

    Args:
        config: of the run; works with all of its nodes.
        resources: of the run.

    Raises:
        ConfigError: it is more than `nodes`, or no smaller number of nodes works.
    """
    low = _min_nodes(config)
    if low is None or low == resources.num_nodes:
        return
    key = "cluster.min_nodes"
    if low > resources.num_nodes:
        raise ConfigError(key, low, f"is more than nodes={resources.num_nodes}", "lower it, or raise nodes")
    if len(node_counts(config, resources)) == 1:
        high = resources.num_nodes - 1
        problem = _node_count_error(config, resources, high)
        assert problem is not None
        why = f"the run can't train on {high} nodes" if low == high else f"no number from {low} to {high} works"
        example = f"with {high}, {problem.key}={problem.value} {problem.problem}"
        remedy = f"lower it, change {problem.key}, or leave cluster.min_nodes out"
        raise ConfigError(key, low, f"{why}: {example}", remedy)


def _min_nodes(config: RunConfig) -> int | None:
    return config.cluster.min_nodes if isinstance(config.cluster, Slurm) else None


def _node_count_error(config: RunConfig, resources: Resources, number: int) -> ConfigError | None:
    """Return the error for a number of nodes that doesn't work; None if it does."""
    if not isinstance(config, Config):
        return None
    local = resources.processes_per_node
    try:
        check_division(config, number * local, local)
    except ConfigError as error:
        return error
    return None

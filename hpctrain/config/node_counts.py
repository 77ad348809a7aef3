"""The numbers of nodes on which a run may train: with cluster.min_nodes, fewer than it asks for."""

from __future__ import annotations

from hpctrain.config.batch import check_batch
from hpctrain.config.cluster import Slurm
from hpctrain.config.mesh import mesh_shape
from hpctrain.config.mesh_checks import check_cpu_offload, check_mesh
from hpctrain.config.resources import Resources
from hpctrain.config.root import Config
from hpctrain.config.run_config import RunConfig
from hpctrain.errors import ConfigError


def node_counts(config: RunConfig, resources: Resources) -> tuple[int, ...]:
    """Return the numbers of nodes on which the run may train, largest first; the first is `nodes`.

    A training can use a number of nodes if the ranks on them divide the global batch, and fit the degrees of
    parallel=mesh. A program copes with any number.

    Args:
        config: of the run; works with all of its nodes.
        resources: of the run.
    """
    least = _min_nodes(config)
    fewer = range(resources.num_nodes - 1, least - 1, -1) if least is not None else ()
    return (resources.num_nodes, *(number for number in fewer if _problem(config, resources, number) is None))


def check_node_counts(config: RunConfig, resources: Resources) -> None:
    """Check that cluster.min_nodes lets a run continue on fewer nodes, if it is set.

    Args:
        config: of the run; works with all of its nodes.
        resources: of the run.

    Raises:
        ConfigError: it is more than `nodes`, or no smaller number of nodes works.
    """
    least = _min_nodes(config)
    if least is None or least == resources.num_nodes:
        return
    key = "cluster.min_nodes"
    if least > resources.num_nodes:
        raise ConfigError(key, least, f"is more than nodes={resources.num_nodes}", "lower it, or raise nodes")
    if len(node_counts(config, resources)) == 1:
        most = resources.num_nodes - 1
        problem = _problem(config, resources, most)
        assert problem is not None
        why = f"the run can't train on {most} nodes" if least == most else f"no number from {least} to {most} works"
        found = f"with {most}, {problem.key}={problem.value} {problem.problem}"
        raise ConfigError(
            key, least, f"{why}: {found}", f"lower it, change {problem.key}, or leave cluster.min_nodes out"
        )


def _min_nodes(config: RunConfig) -> int | None:
    return config.cluster.min_nodes if isinstance(config.cluster, Slurm) else None


def _problem(config: RunConfig, resources: Resources, number: int) -> ConfigError | None:
    """Why a number of nodes doesn't work; None if it does."""
    if not isinstance(config, Config):
        return None
    local = resources.processes_per_node
    try:
        mesh = mesh_shape(config.parallel, number * local, local)
        check_mesh(config, mesh)
        check_batch(config, number * local if mesh is None else mesh.data_parallel_size)
        check_cpu_offload(config.parallel, number * local)
    except ConfigError as error:
        return error
    return None

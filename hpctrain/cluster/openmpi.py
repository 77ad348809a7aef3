"""The place of a rank that Open MPI's mpirun started; MPI itself isn't used.

Source: Open MPI's FAQ "Running MPI jobs", environment variables.
"""

from __future__ import annotations

import zlib

from hpctrain.cluster.slurm_step import in_step, job_nodes, step_nodes
from hpctrain.cluster.variables import Place, Variables

_RANK, _SIZE = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
_LOCAL_RANK, _LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"


def is_rank(variables: Variables) -> bool:
    """Whether mpirun started this process."""
    return variables.text(_RANK) is not None or variables.text(_SIZE) is not None


def place(variables: Variables) -> Place:
    """The place of an mpirun process, on equally filled nodes.

    Raises:
        ClusterEnvironmentError: variables are missing or contradict each other, the nodes are filled unequally, or
            there are several nodes and no variable names rank zero's.
    """
    rank, world_size = variables.needed_number(_RANK, _SIZE), variables.needed_number(_SIZE, _RANK)
    local_rank = variables.needed_number(_LOCAL_RANK, _RANK)
    local_world_size = variables.needed_number(_LOCAL_SIZE, _RANK)
    variables.require_below(_RANK, _SIZE)
    variables.require_below(_LOCAL_RANK, _LOCAL_SIZE)
    _refuse_inner_step(variables)
    # OMPI_COMM_WORLD_NODE_RANK is a rank on the node, not the node's rank, which follows from the mapping
    num_nodes, rest = divmod(world_size, local_world_size)
    if rest == 0 and local_rank == rank % local_world_size:  # --map-by slot
        node_rank = rank // local_world_size
    elif rest == 0 and local_rank == rank // num_nodes:  # --map-by node
        node_rank = rank % num_nodes
    else:
        raise variables.error(
            "expected the same number of ranks on every node, placed by slot or by node; "
            "use mpirun --map-by ppr:N:node",
            *(_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE),
        )
    nodes = job_nodes(variables)
    nodes = nodes if len(nodes) == num_nodes else ()
    return Place(
        rank=rank,
        local_rank=local_rank,
        node_rank=node_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        num_nodes=num_nodes,
        master_addr=_master_addr(variables, num_nodes, nodes),
        nodes=nodes,
    )


def port_seed(variables: Variables) -> int:
    """A number that all ranks of one mpirun share, and that differs between invocations."""
    for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"):
        value = variables.text(name)
        if value is not None:
            return zlib.crc32(value.encode())
    return 0


def _refuse_inner_step(variables: Variables) -> None:
    # mpirun's daemons form a step of one task per node; in any other step, srun was started by mpirun's ranks
    if in_step(variables) and set(step_nodes(variables)[1]) != {1}:
        variables.require_equal(_RANK, "SLURM_PROCID")
        variables.require_equal(_SIZE, "SLURM_STEP_NUM_TASKS")


def _master_addr(variables: Variables, num_nodes: int, nodes: tuple[str, ...]) -> str:
    given = variables.text("MASTER_ADDR")
    if given is not None:
        return given
    if num_nodes == 1:
        return "127.0.0.1"
    if nodes:
        return nodes[0]
    raise variables.error(
        "expected MASTER_ADDR, since the ranks are on several nodes and no other variable names rank zero's; "
        "pass mpirun -x MASTER_ADDR=HOST, the first host of its list",
        _SIZE,
        _LOCAL_SIZE,
    )

"""A rank that srun started."""

from __future__ import annotations

from hpctrain.cluster import nodelist
from hpctrain.cluster.place import Place, is_loopback
from hpctrain.cluster.variables import Variables


def place(variables: Variables) -> Place:
    """The place of a step's task.

    Raises:
        ClusterEnvironmentError: variables are missing or contradict each other.
    """
    because = "SLURM_STEP_ID"
    rank = variables.needed_number("SLURM_PROCID", because)
    local_rank = variables.needed_number("SLURM_LOCALID", because)
    node_rank = variables.needed_number("SLURM_NODEID", because)
    world_size = variables.needed_number("SLURM_STEP_NUM_TASKS", because)
    variables.require_below("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    names, counts = step_nodes(variables)
    if len(names) != len(counts):
        raise variables.error(
            "SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE tell different numbers of nodes; "
            "unset what another step or shell has left behind",
            "SLURM_STEP_NODELIST",
            "SLURM_STEP_TASKS_PER_NODE",
        )
    if sum(counts) != world_size:
        raise variables.error(
            "SLURM_STEP_NUM_TASKS is not the sum of SLURM_STEP_TASKS_PER_NODE; unset what another step has left behind",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_STEP_TASKS_PER_NODE",
        )
    if node_rank >= len(counts) or local_rank >= counts[node_rank]:
        raise variables.error(
            "expected SLURM_NODEID and SLURM_LOCALID to be a place in SLURM_STEP_TASKS_PER_NODE; "
            "unset what another step has left behind",
            *("SLURM_NODEID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
        )
    return Place(
        rank=rank,
        local_rank=local_rank,
        node_rank=node_rank,
        world_size=world_size,
        local_world_size=counts[node_rank],
        num_nodes=len(counts),
        master_addr=_master_addr(variables, names),
        nodes=names,
    )


def step_nodes(variables: Variables) -> tuple[tuple[str, ...], list[int]]:
    """The names of the step's nodes, and the number of tasks on each."""
    because = "SLURM_STEP_ID"
    names = variables.needed_text("SLURM_STEP_NODELIST", because)
    counts = variables.needed_text("SLURM_STEP_TASKS_PER_NODE", because)
    return (
        tuple(nodelist.expand(names, variable="SLURM_STEP_NODELIST")),
        nodelist.tasks_per_node(counts, variable="SLURM_STEP_TASKS_PER_NODE"),
    )


def _master_addr(variables: Variables, nodes: tuple[str, ...]) -> str:
    """What the batch script exported, else the first node, where block and cyclic distribution put rank zero."""
    given = variables.text("MASTER_ADDR")
    if given is None:
        return nodes[0]
    if len(nodes) > 1 and is_loopback(given):
        raise variables.error(
            "MASTER_ADDR is a loopback address, but SLURM_STEP_NODELIST has several nodes; unset MASTER_ADDR",
            "MASTER_ADDR",
            "SLURM_STEP_NODELIST",
        )
    return given

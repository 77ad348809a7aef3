"""A rank that submitit's local executor started: one node, for tests and debugging.

Source: submitit 1.5.4, `submitit/local/local.py`, `LocalJobEnvironment`.
"""

from __future__ import annotations

from hpctrain.cluster.job import own_node
from hpctrain.cluster.place import Place
from hpctrain.cluster.variables import Variables


def is_rank(variables: Variables) -> bool:
    """Whether submitit's local executor started this process."""
    return variables.text("SUBMITIT_EXECUTOR") == "local" and variables.text("SUBMITIT_LOCAL_GLOBALID") is not None


def place(variables: Variables) -> Place:
    """The place of a task of a local submitit job.

    Raises:
        ClusterEnvironmentError: variables are missing or contradict each other.
    """
    because = "SUBMITIT_EXECUTOR"
    rank = variables.needed_number("SUBMITIT_LOCAL_GLOBALID", because)
    local_rank = variables.needed_number("SUBMITIT_LOCAL_LOCALID", because)
    world_size = variables.needed_number("SUBMITIT_LOCAL_NTASKS", because)
    variables.require_below("SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS")
    variables.require_equal("SUBMITIT_LOCAL_LOCALID", "SUBMITIT_LOCAL_GLOBALID")
    return Place(
        rank=rank,
        local_rank=local_rank,
        node_rank=0,
        world_size=world_size,
        local_world_size=world_size,
        num_nodes=1,
        master_addr="127.0.0.1",
        nodes=own_node(variables),
    )


def refuse(variables: Variables) -> None:
    """Raise where a task of an srun step also carries the variables of a local submitit job."""
    if is_rank(variables):
        raise variables.error(
            "SLURM_STEP_ID says that srun started this process, SUBMITIT_LOCAL_GLOBALID that submitit did; "
            "unset SUBMITIT_EXECUTOR",
            *("SLURM_STEP_ID", "SUBMITIT_LOCAL_GLOBALID"),
        )

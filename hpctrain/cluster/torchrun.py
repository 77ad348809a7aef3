"""Derive the place of a rank from torchrun's variables, which hpctrain's local launcher sets as well.

Source: torch.distributed.elastic.agent, `LocalElasticAgent._start_workers`.
"""

from __future__ import annotations

from hpctrain.cluster.slurm_step import job_nodes
from hpctrain.cluster.variables import Place, Variables, is_loopback

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_ALL = (*_PLACE, "MASTER_ADDR", "MASTER_PORT")


def is_innermost(variables: Variables) -> bool:
    """Whether torchrun itself started this process, perhaps inside a SLURM step or an MPI program."""
    return variables.text("TORCHELASTIC_RUN_ID") is not None


def is_complete(variables: Variables) -> bool:
    """Whether the variables of torch's `env://` protocol and the local rank are all set."""
    return all(variables.text(name) is not None for name in _ALL)


def refuse_partial(variables: Variables) -> None:
    """Raise if only some of a rank's variables are set."""
    there = [name for name in _PLACE if variables.text(name) is not None]
    if there:
        missing = [name for name in _ALL if variables.text(name) is None]
        raise variables.error(
            f"expected {', '.join(missing)} in addition to {', '.join(there)}; unset {' '.join(there)} "
            "to run as a single process, or start the ranks with srun or torchrun",
            *there,
        )


def refuse_contradiction(variables: Variables, rank: str, world_size: str, local_rank: str) -> None:
    """Raise if torchrun's variables are set as well and contradict the named ones."""
    variables.require_equal("RANK", rank)
    variables.require_equal("WORLD_SIZE", world_size)
    variables.require_equal("LOCAL_RANK", local_rank)


def place(variables: Variables) -> Place:
    """Derive the place of a process that torchrun, or a launcher of its kind, started.

    Raises:
        ClusterEnvironmentError: variables are missing or contradict each other.
    """
    if not is_complete(variables):
        refuse_partial(variables)
    because = "TORCHELASTIC_RUN_ID"
    rank, world_size = variables.needed_number("RANK", because), variables.needed_number("WORLD_SIZE", because)
    local_rank = variables.needed_number("LOCAL_RANK", because)
    local_world_size = _local_world_size(variables, world_size)
    variables.require_below("RANK", "WORLD_SIZE")
    variables.require_below("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    variables.require_below("GROUP_RANK", "GROUP_WORLD_SIZE")
    if local_world_size > world_size or local_rank > rank:
        raise variables.error(
            "expected LOCAL_WORLD_SIZE of at most WORLD_SIZE, and LOCAL_RANK of at most RANK; "
            "unset the ones that another launcher exported",
            *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        )
    # GROUP_* are torchrun's own: other launchers with its variables may leave them out
    num_nodes = variables.number("GROUP_WORLD_SIZE") or -(-world_size // local_world_size)
    node_rank = variables.number("GROUP_RANK")
    nodes = job_nodes(variables)
    return Place(
        rank=rank,
        local_rank=local_rank,
        node_rank=rank // local_world_size if node_rank is None else node_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        num_nodes=num_nodes,
        master_addr=variables.needed_text("MASTER_ADDR", because),
        nodes=nodes if len(nodes) == num_nodes else (),
    )


def _local_world_size(variables: Variables, world_size: int) -> int:
    given = variables.number("LOCAL_WORLD_SIZE")
    if given:
        return given
    # without LOCAL_WORLD_SIZE, the launcher is trusted only on a single node
    if variables.number("RANK") == variables.number("LOCAL_RANK") and is_loopback(
        variables.needed_text("MASTER_ADDR", "RANK")
    ):
        return world_size
    raise variables.error(
        "expected LOCAL_WORLD_SIZE to be the number of ranks on this node, in addition to WORLD_SIZE; set it",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
    )

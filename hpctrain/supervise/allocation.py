"""The nodes of a job, and the overrides for a run in an allocation that its user requested."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.cluster.nodelist import tasks_per_node
from hpctrain.errors import ClusterEnvironmentError


@dataclass
class Allocation:
    """The nodes that SLURM gave to a job.

    Args:
        nodes: all of them, in SLURM's order.
        num_nodes: how many the ranks need.
        keeps_spares: whether the job outlives a dead node (`sbatch --no-kill`).
        ranks_per_node: number of consecutive ranks on each node; None if srun may distribute them in another way.
    """

    nodes: tuple[str, ...]
    num_nodes: int
    keeps_spares: bool = False
    ranks_per_node: int | None = None
    _out: set[str] = field(default_factory=set)

    @property
    def step_nodes(self) -> tuple[str, ...]:
        """The nodes on which ranks run, in rank order."""
        return tuple(node for node in self.nodes if node not in self._out)[: self.num_nodes]

    @property
    def spares(self) -> int:
        """Nodes in reserve; negative if too few nodes are left. 0 if the job ends when any of its nodes fails."""
        return len(self.nodes) - len(self._out) - self.num_nodes if self.keeps_spares else 0

    @property
    def lost(self) -> frozenset[str]:
        """The nodes that get no ranks any more."""
        return frozenset(self._out)

    def lose(self, nodes: Iterable[str]) -> None:
        """Keep ranks away from these nodes from now on."""
        self._out |= set(nodes)

    def of_rank(self, rank: int) -> str | None:
        """The node of a rank; None if it is unknown."""
        used = self.step_nodes
        if self.ranks_per_node is None or rank // self.ranks_per_node >= len(used):
            return None
        return used[rank // self.ranks_per_node]

    def of_ranks(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """The known nodes of these ranks; empty if the ranks are on all nodes, since no node is then more suspect."""
        found = set(filter(None, map(self.of_rank, ranks)))
        return tuple(sorted(found)) if len(found) < len(self.step_nodes) else ()


def allocation_overrides(environ: Mapping[str, str], words: Sequence[str]) -> list[str]:
    """The overrides by which a new run uses the allocation of a batch script that its user wrote.

    Args:
        environ: the batch script's environment.
        words: the user's own overrides, which come later and win.

    Raises:
        ClusterEnvironmentError: the nodes have different numbers of tasks.
    """
    found = [] if any(word.startswith("cluster=") for word in words) else ["cluster=slurm"]
    name = "SLURM_TASKS_PER_NODE"
    counts = tasks_per_node(environ.get(name, "1"), variable=name)
    if len(set(counts)) > 1:
        raise ClusterEnvironmentError(
            "expected the same number of tasks on each node; pass --ntasks-per-node to sbatch", {name: environ[name]}
        )
    values = {
        "nodes": environ.get("SLURM_JOB_NUM_NODES"),
        "cluster.processes_per_node": str(counts[0]),
        "cluster.gpus_per_node": environ.get("SLURM_GPUS_ON_NODE"),
        "cluster.cpus_per_process": environ.get("SLURM_CPUS_PER_TASK"),
    }
    return found + [f"{key}={value}" for key, value in values.items() if value]

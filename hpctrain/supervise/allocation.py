"""The nodes of a job, and the overrides for a run in an allocation that its user requested."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.cluster.slurm_step import tasks_per_node
from hpctrain.cluster.variables import Variables, ignored_message
from hpctrain.errors import ClusterEnvironmentError

log = logging.getLogger("hpctrain.supervise")


@dataclass
class Allocation:
    """The nodes that SLURM gave to a job.

    A job that lost nodes grows again only at its next requeue: SLURM adds nodes to a running job only by merging
    another job into it. The first node can't be lost: if the batch script's own node dies, SLURM requeues the job.

    Args:
        nodes: all of them, in SLURM's order.
        node_counts: the numbers of nodes on which the ranks can run, largest first.
        outlives_a_node: whether the job stays when one of its nodes dies (`sbatch --no-kill`).

    Attributes:
        lost: the nodes that get no ranks any more.
    """

    nodes: tuple[str, ...]
    node_counts: tuple[int, ...]
    outlives_a_node: bool = False
    lost: set[str] = field(default_factory=set, init=False)

    @property
    def usable(self) -> tuple[str, ...]:
        """The nodes that aren't lost."""
        return tuple(node for node in self.nodes if node not in self.lost)

    @property
    def num_nodes(self) -> int:
        """The number of nodes for the ranks: as many as they can use; the smallest number if too few are left."""
        return next((count for count in self.node_counts if count <= len(self.usable)), self.node_counts[-1])

    @property
    def step_nodes(self) -> tuple[str, ...]:
        """The nodes on which ranks run, in SLURM's order, which need not be that of the ranks."""
        return self.usable[: self.num_nodes]

    @property
    def described(self) -> str:
        """The nodes on which ranks run, for the log; with the requested number, if these are fewer."""
        text, max_nodes = " ".join(self.step_nodes), self.node_counts[0]
        return text if self.num_nodes == max_nodes else f"{text}: {len(self.step_nodes)} of {max_nodes} nodes"

    @property
    def spares(self) -> int:
        """Nodes that may fail before the job has too few; negative if it has. 0 if it ends when any node fails."""
        return len(self.usable) - self.node_counts[-1] if self.outlives_a_node else 0

    def lose(self, nodes: Iterable[str]) -> None:
        """Keep ranks away from these nodes from now on."""
        self.lost |= set(nodes)


def allocation_overrides(environ: Mapping[str, str], words: Sequence[str], *, with_gpus: bool = True) -> list[str]:
    """The overrides by which a new run uses the allocation of a batch script that its user wrote.

    Args:
        environ: the batch script's environment.
        words: the user's own overrides, which come later and win.
        with_gpus: set the number of GPUs; not if cluster.sbatch.gres has them.

    Raises:
        ClusterEnvironmentError: the nodes have different numbers of tasks.
    """
    overrides = [] if any(word.startswith("cluster=") for word in words) else ["cluster=slurm"]
    name = "SLURM_TASKS_PER_NODE"
    counts = tasks_per_node(environ.get(name, "1"), variable=name)
    if len(set(counts)) > 1:
        raise ClusterEnvironmentError(
            "expected the same number of tasks on each node; pass --ntasks-per-node to sbatch", {name: environ[name]}
        )
    variables = Variables(environ)
    values = {
        "nodes": variables.number("SLURM_JOB_NUM_NODES") or len(counts),
        "cluster.processes_per_node": counts[0],
        "cluster.gpus_per_node": variables.number("SLURM_GPUS_ON_NODE") if with_gpus else None,
        "cluster.cpus_per_process": variables.number("SLURM_CPUS_PER_TASK"),
    }
    if message := ignored_message(variables.unparsable):
        log.warning("%s", message)
    return overrides + [f"{key}={value}" for key, value in values.items() if value is not None]

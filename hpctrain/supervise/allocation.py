"""The nodes of a job: those that the next ranks run on, those in reserve, and those that are out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass
class Allocation:
    """The nodes that SLURM gave to a job.

    Args:
        nodes: all of them, in SLURM's order.
        num_nodes: how many the ranks need.
        keeps_spares: whether the job outlives a dead node (`sbatch --no-kill`).
    """

    nodes: tuple[str, ...]
    num_nodes: int
    keeps_spares: bool = False
    _out: set[str] = field(default_factory=set)

    @property
    def step_nodes(self) -> tuple[str, ...]:
        """Where ranks run, in the order of their ranks."""
        return tuple(node for node in self.nodes if node not in self._out)[: self.num_nodes]

    @property
    def spares(self) -> int:
        """Nodes in reserve; below zero where nodes died and there are too few. 0 where the job dies with any node."""
        return len(self.nodes) - len(self._out) - self.num_nodes if self.keeps_spares else 0

    def lose(self, nodes: Iterable[str]) -> None:
        """No more ranks on these."""
        self._out |= set(nodes)

    def of_ranks(self, ranks: Sequence[int], processes_per_node: int) -> tuple[str, ...]:
        """The nodes of these ranks; none where they are on all of them: no one is to blame more than another."""
        used = self.step_nodes
        found = {used[rank // processes_per_node] for rank in ranks if rank // processes_per_node < len(used)}
        return tuple(sorted(found)) if len(found) < len(used) else ()

"""What the second step of the doctor's job left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpctrain.doctor.job_record import JobRecord
from hpctrain.doctor.pairs import Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAnswers:
    """The records of the ranks, and what they measured together.

    Attributes:
        job: the record of the batch script.
        records: of the ranks, by rank.
        measured: what they measured together; empty if they didn't come that far.
        processes_per_node: ranks on each node.
        gpus_per_node: that the request asks for.
        interface: `cluster.network_interface`.
        last_lines: of the logs of ranks without a record, by rank.
    """

    job: JobRecord
    records: Mapping[int, Mapping[str, Any]]
    measured: Mapping[str, Any]
    processes_per_node: int
    gpus_per_node: int
    interface: str | None
    last_lines: Mapping[int, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """The number of ranks that were started."""
        return len(self.job.rank_nodes) * self.processes_per_node

    @property
    def pairs(self) -> list[Pair]:
        """The measured pairs of nodes."""
        return [Pair.from_record(record) for record in self.measured.get("pairs", ())]

    def node_of(self, rank: int) -> str:
        """The node of a rank that left a record."""
        return str(self.records[rank]["node"])

    @property
    def incomplete_nodes(self) -> tuple[str, ...]:
        """The nodes on which ranks left no record."""
        recorded = Counter(map(self.node_of, self.records))
        return tuple(node for node in self.job.rank_nodes if recorded[node] < self.processes_per_node)

"""What the second step of the doctor's job left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpctrain.doctor.folder import DoctorFolder
from hpctrain.doctor.job_record import JobRecord
from hpctrain.doctor.pairs import Pair
from hpctrain.run.record_fields import COUNT, FLAG, POSITIVE, TEXT, TEXTS, FieldType, list_of, read_fields

_GPU = ("index", "name", "driver", "ecc_errors", "temperature", "hardware_slowdown", "thermal_slowdown", "power_brake")
_SHORT = FieldType("a short string", lambda value: isinstance(value, str) and len(value) <= 200)
_INTERFACE = {"name": TEXT, "address": TEXT, "mbit_per_s": COUNT}
_PEERS = FieldType(
    "a list of pairs of numbers",
    lambda value: (
        isinstance(value, list)
        and all(isinstance(pair, list) and len(pair) == 2 and all(map(COUNT.accepts, pair)) for pair in value)
    ),
)
_OF_A_RANK = {
    **dict.fromkeys(("node", "stage", "error", "own_address", "smi_problem"), TEXT),
    "met": FLAG,
    "interfaces": list_of(_INTERFACE, tuple(_INTERFACE)),
    "devices": TEXTS,
    "no_peer_access": _PEERS,
    "gpus": list_of(dict.fromkeys(_GPU, _SHORT), _GPU),
    **dict.fromkeys(("flops_per_s", "write_bytes_per_s"), POSITIVE),
}
_PAIR = {
    **dict.fromkeys(("first", "second"), TEXT),
    **dict.fromkeys(("latency_s", "best_latency_s", "bytes_per_s"), POSITIVE),
    **dict.fromkeys(("first_sent", "second_sent", "first_repeated", "second_repeated"), COUNT),
}
_REDUCTION = {"backend": TEXT, "bytes": COUNT, "seconds": POSITIVE}
_MEASURED = {
    "pairs": list_of(_PAIR, ("first", "second", "latency_s", "best_latency_s", "bytes_per_s")),
    "reductions": list_of(_REDUCTION, tuple(_REDUCTION)),
    "checkpoint_bytes": COUNT,
}


def read_rank(folder: DoctorFolder, rank: int) -> dict[str, Any]:
    """Read the record of a rank; empty if it left none.

    Raises:
        RunDirectoryError: a field of the record has the wrong type.
    """
    return _without_nulls(read_fields(folder.rank(rank), _OF_A_RANK, ("node", "stage")))


def read_measured(folder: DoctorFolder) -> dict[str, Any]:
    """Read what the ranks measured together; empty if they didn't get that far.

    Raises:
        RunDirectoryError: a field of the record has the wrong type.
    """
    return _without_nulls(read_fields(folder.measured, _MEASURED))


def _without_nulls(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAnswers:
    """The records of the ranks, and what they measured together.

    Attributes:
        job: the record of the batch script.
        records: of the ranks, by rank.
        measured: what they measured together; empty if they didn't get that far.
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

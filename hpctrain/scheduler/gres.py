"""GPUs among SLURM's generic resources (gres): of a request, and of a cluster's nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.errors import SchedulerError
from hpctrain.phrases import counted

_SEPARATOR = re.compile(r",(?![^(]*\))")
"""A comma that separates resources; those within parentheses separate sockets."""
ASKS_FOR_GPUS = re.compile(r"(?:gres[/:])?gpu\s*(?:[:=(]|$)")
"""Matches a resource that is GPUs."""
# 22.05 takes gres:gpu:2, and 26.05 gres/gpu:2 and gpu=2. gpu:3090 is a number of GPUs, and gpu:3090:2 has a type
_GPUS = re.compile(
    r"(?:gres[/:])?gpu(?:[:=](?P<type>(?!\d+[kmgtp]?(?:\(|$))[\w.+-]+))?(?:[:=](?P<count>\d{1,9})(?P<unit>[kmgtp]?))?(?:\(.*\))?",
    re.IGNORECASE,
)
_UNITS = " kmgtp"


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of one type.

    Attributes:
        gpu_type: as gres.conf names it; empty for any type, or for GPUs without one.
        count: how many.
    """

    gpu_type: str
    count: int


def gpus_of(gres: str) -> tuple[Gpus, ...]:
    """Parse the GPUs of a text such as `gpu:a100:4,nvme:1`; nodes print `gpu:a100:4(S:0-1)`.

    Raises:
        SchedulerError: their type or number can't be parsed.
    """
    parts = [part.strip() for part in _SEPARATOR.split(gres)]
    return tuple(_gpus_of_part(part) for part in parts if ASKS_FOR_GPUS.match(part))


def _gpus_of_part(part: str) -> Gpus:
    match = _GPUS.fullmatch(part)
    if match is None:
        raise SchedulerError(f"expected GPUs such as gpu:4 or gpu:a100:4, found {part[:80]}")
    factor = 1024 ** _UNITS.index(match["unit"].lower() or " ") if match["unit"] else 1
    return Gpus(match["type"] or "", int(match["count"] or 1) * factor)


@dataclass(frozen=True, slots=True)
class GpuNode:
    """A node with GPUs.

    Attributes:
        partitions: that the node is in.
        gpus: of the node.
    """

    partitions: tuple[str, ...]
    gpus: tuple[Gpus, ...]


@dataclass(frozen=True, slots=True)
class SiteGpus:
    """The GPUs of a cluster's nodes.

    Attributes:
        nodes: those with GPUs.
    """

    nodes: Sequence[GpuNode] = ()

    @classmethod
    def of_nodes(cls, records: Sequence[Mapping[str, str]]) -> SiteGpus:
        """Read the records of `scontrol show node`, field to value.

        Raises:
            SchedulerError: the GPUs of a node can't be parsed.
        """
        nodes = [
            GpuNode(tuple(record.get("Partitions", "").split(",")), gpus_of(record.get("Gres", "")))
            for record in records
        ]
        return cls([node for node in nodes if node.gpus])

    def of_partitions(self, names: str | None) -> SiteGpus:
        """Those of the nodes of some partitions; of all nodes without a name.

        Args:
            names: separated by commas, as in `sbatch --partition`.
        """
        chosen = set((names or "").split(","))
        return self if names is None else SiteGpus([node for node in self.nodes if chosen & {*node.partitions}])

    @property
    def types(self) -> list[str]:
        """The types, those of most nodes first; GPUs without a type have none."""
        names = [gpu_type for node in self.nodes for gpu_type in {gpus.gpu_type for gpus in node.gpus} if gpu_type]
        return sorted(set(names), key=lambda name: (-names.count(name), name))

    def partitions_of(self, gpu_type: str) -> list[str]:
        """The partitions with GPUs of a type, in the order of their names."""
        nodes = (node for node in self.nodes if any(gpus.gpu_type == gpu_type for gpus in node.gpus))
        return sorted({name for node in nodes for name in node.partitions if name})

    @property
    def counts(self) -> list[int]:
        """The numbers of GPUs that nodes have, the smallest first."""
        return sorted({sum(gpus.count for gpus in node.gpus) for node in self.nodes})

    def describe(self, gpu_type: str) -> str:
        """Describe the GPUs of a type: `a100 (4 per node, on 12 nodes)`."""
        counts = [sum(gpus.count for gpus in node.gpus if gpus.gpu_type == gpu_type) for node in self.nodes]
        numbers = sorted({count for count in counts if count})
        num_nodes = sum(count > 0 for count in counts)
        return f"{gpu_type} ({' or '.join(map(str, numbers))} per node, on {counted(num_nodes, 'node')})"

    @property
    def descriptions(self) -> list[str]:
        """Describe the GPUs of each type, in the order of `types`."""
        return [self.describe(gpu_type) for gpu_type in self.types]

"""Pairs of nodes: in which order they are measured, and which of them are slow."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

SLOW = 3.0
"""A pair is slow if it has less than this fraction of the median bandwidth, or this multiple of the latency."""
LATENCY_FLOOR_S = 100e-6
"""Added to the median latency before it is multiplied: on a fast network, a few microseconds don't matter."""
LOSS = 0.003
"""Share of segments that were sent again from which a link loses packets; a healthy one has hardly any."""
FEWEST_LOST = 3
MOSTLY = 2 / 3
"""A node is at fault if this share of its pairs is, and less than that of the pairs without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What was measured between two nodes.

    Attributes:
        first, second: their names.
        latency_s: median seconds for a small message, one way.
        best_latency_s: the shortest.
        bytes_per_s: of the best large message.
        first_sent, second_sent: TCP segments that each of them sent, while the messages came with pauses.
        first_repeated, second_repeated: those that were sent again, because no acknowledgement arrived.
    """

    first: str
    second: str
    latency_s: float
    best_latency_s: float
    bytes_per_s: float
    first_sent: int = 0
    second_sent: int = 0
    first_repeated: int = 0
    second_repeated: int = 0

    @property
    def nodes(self) -> tuple[str, str]:
        """Both names."""
        return self.first, self.second

    @property
    def repeated(self) -> int:
        """Segments that were sent again in either direction."""
        return self.first_repeated + self.second_repeated

    @property
    def loses(self) -> bool:
        """Whether the link between them loses packets."""
        sent = self.first_sent + self.second_sent
        return self.repeated >= FEWEST_LOST and self.repeated > LOSS * sent

    def best_of(self, other: Pair | None) -> Pair:
        """The better of two measurements, value by value; losses are those of the second."""
        if other is None:
            return self
        return replace(
            other,
            latency_s=min(self.latency_s, other.latency_s),
            best_latency_s=min(self.best_latency_s, other.best_latency_s),
            bytes_per_s=max(self.bytes_per_s, other.bytes_per_s),
        )

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Pair:
        """The pair of a record that `as_record` made."""
        return cls(**{name: record[name] for name in cls.__dataclass_fields__ if name in record})

    def as_record(self) -> dict[str, Any]:
        """The pair for JSON."""
        return asdict(self)


def pair_rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of ``count`` things, in rounds in which each has at most one partner.

    The circle method for round-robin tournaments: one place stays, and the others move around it.
    """
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        facing = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def slow_pairs(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs that are much slower than most; of fewer than three pairs, none can be told apart."""
    if len(pairs) < 3:
        return []
    bandwidth = statistics.median(pair.bytes_per_s for pair in pairs)
    latency = statistics.median(pair.best_latency_s for pair in pairs)
    return [
        pair
        for pair in pairs
        if pair.bytes_per_s < bandwidth / SLOW or pair.best_latency_s > SLOW * (latency + LATENCY_FLOOR_S)
    ]


def losing_pairs(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs between which packets are lost."""
    return [pair for pair in pairs if pair.loses]


def suspicious(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs that are measured again, the slowest first; of two nodes the only one."""
    if len(pairs) < 3:
        return list(pairs)
    doubtful = {pair.nodes: pair for pair in (*slow_pairs(pairs), *losing_pairs(pairs))}
    return sorted(doubtful.values(), key=lambda pair: pair.bytes_per_s)


def nodes_at_fault(bad: Sequence[Pair], pairs: Sequence[Pair]) -> list[str]:
    """The nodes to which bad pairs point: most of a node's pairs are bad, and most pairs without it aren't.

    Args:
        bad: some of the pairs.
        pairs: all of them.
    """
    chosen = {pair.nodes for pair in bad}
    found: list[str] = []
    for node in sorted({node for pair in bad for node in pair.nodes}):
        own = [pair.nodes in chosen for pair in pairs if node in pair.nodes]
        if len(own) > 1 and sum(own) >= MOSTLY * len(own):
            found.append(node)
    others = [pair for pair in pairs if not set(pair.nodes) & set(found)]
    # if the pairs without them are bad as well, it is the network
    if others and sum(pair.nodes in chosen for pair in others) >= MOSTLY * len(others):
        return []
    return found

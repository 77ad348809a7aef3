"""Measurements of the ranks: links between nodes, figures to compare with a baseline, and lines to read."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from hpctrain.doctor.finding import Finding, Severity
from hpctrain.doctor.folder import DoctorFolder, DoctorJobRecord, RankRecord, from_json
from hpctrain.files import read_json_or_empty, write_json
from hpctrain.phrases import brief_time, counted, scaled
from hpctrain.run.record_fields import (
    COUNT,
    POSITIVE,
    TEXT,
    TIME,
    FieldType,
    describe_wrong_field,
    field_types,
    list_of,
    read_fields,
)

SLOW = 3.0
"""A pair is slow if it has less than this fraction of the median bandwidth, or this multiple of the latency."""
LATENCY_FLOOR_S = 100e-6
"""Added to the median latency before it is multiplied: on a fast network, a few microseconds don't matter."""
LOSS = 0.003
"""Share of segments that were sent again from which a link loses packets; a healthy one has hardly any."""
FEWEST_LOST = 3
MOSTLY = 2 / 3
"""A node is at fault if this share of its pairs is, and less than that of the pairs without it."""
SMALL_BYTES = 1024
"""An all-reduce of less shows the latency, a larger one the bandwidth."""
WORSE = {"_s": 3.0, "disk_bandwidth": 3.0}
USUALLY_WORSE = 2.0
"""A figure that is this many times worse than before is reported; times and disks vary more than others."""
SHORT_S = 50e-6
"""Times below this are taken for equal."""
OF_NETWORK = ("pair", "gloo", "nccl")
"""The beginnings of the names of figures of the network."""
LOWER_IS_BETTER = "_s"
"""The end of the names of figures that are seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Measurements of the link between two nodes.

    Attributes:
        first, second: their names.
        latency_s: median seconds for a small message, one way.
        best_latency_s: the shortest.
        bytes_per_s: of the best large message.
        first_sent, second_sent: TCP segments that each of them sent, while the messages came with pauses.
        first_repeated, second_repeated: those that were sent again, because no acknowledgement arrived.
    """

    first: Annotated[str, TEXT]
    second: Annotated[str, TEXT]
    latency_s: Annotated[float, POSITIVE]
    best_latency_s: Annotated[float, POSITIVE]
    bytes_per_s: Annotated[float, POSITIVE]
    first_sent: Annotated[int, COUNT] = 0
    second_sent: Annotated[int, COUNT] = 0
    first_repeated: Annotated[int, COUNT] = 0
    second_repeated: Annotated[int, COUNT] = 0

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
        num_sent = self.first_sent + self.second_sent
        return self.repeated >= FEWEST_LOST and self.repeated > LOSS * num_sent

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


def suspicious_pairs(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs that are measured again, the slowest first; of two nodes the only one."""
    if len(pairs) < 3:
        return list(pairs)
    doubtful = {pair.nodes: pair for pair in (*slow_pairs(pairs), *(pair for pair in pairs if pair.loses))}
    return sorted(doubtful.values(), key=lambda pair: pair.bytes_per_s)


def nodes_at_fault(bad: Sequence[Pair], pairs: Sequence[Pair]) -> list[str]:
    """The nodes to which bad pairs point: most of a node's pairs are bad, and most pairs without it aren't.

    A node is compared with its peers: there is no table of what a network should reach.

    Args:
        bad: some of the pairs.
        pairs: all of them.
    """
    bad_pairs = {pair.nodes for pair in bad}
    suspects: list[str] = []
    for node in sorted({node for pair in bad for node in pair.nodes}):
        is_bad = [pair.nodes in bad_pairs for pair in pairs if node in pair.nodes]
        if len(is_bad) > 1 and sum(is_bad) >= MOSTLY * len(is_bad):
            suspects.append(node)
    other_pairs = [pair for pair in pairs if not set(pair.nodes) & set(suspects)]
    # if the pairs without them are bad as well, it is the network
    if other_pairs and sum(pair.nodes in bad_pairs for pair in other_pairs) >= MOSTLY * len(other_pairs):
        return []
    return suspects


_REDUCTION = {"backend": TEXT, "bytes": COUNT, "seconds": POSITIVE}
_MEASURED = {
    "pairs": list_of(field_types(Pair), ("first", "second", "latency_s", "best_latency_s", "bytes_per_s")),
    "reductions": list_of(_REDUCTION, tuple(_REDUCTION)),
    "checkpoint_bytes": COUNT,
}
_BASELINE = {
    "time": TIME,
    "figures": FieldType(
        "positive numbers by name", lambda value: isinstance(value, dict) and all(map(POSITIVE.accepts, value.values()))
    ),
}


def read_measured(folder: DoctorFolder) -> dict[str, Any]:
    """Read what the ranks measured together; empty if they didn't get that far.

    Raises:
        RunDirectoryError: a field of the record has the wrong type.
    """
    return {name: value for name, value in read_fields(folder.measured, _MEASURED).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class RankAnswers:
    """The records of the ranks, and what they measured together.

    Attributes:
        job: the record of the batch script.
        records: of the ranks, by rank.
        measured: what they measured together; empty if they didn't get that far.
        processes_per_node: ranks on each node.
        gpus_per_node: that the request asks for.
        interface: `cluster.network_interface`.
        partition: `cluster.partition`.
        last_line: of the log of the first rank without a record; empty if all left one, or have no log.
    """

    job: DoctorJobRecord
    records: Mapping[int, RankRecord]
    measured: Mapping[str, Any]
    processes_per_node: int
    gpus_per_node: int
    interface: str | None
    partition: str | None = None
    last_line: str = ""

    @property
    def world_size(self) -> int:
        """The number of ranks that were started."""
        return len(self.job.rank_nodes) * self.processes_per_node

    @property
    def request(self) -> str:
        """The name under which the figures are stored in the baseline: they depend on all of these."""
        sizes = f"{len(self.job.rank_nodes)} nodes, {self.processes_per_node} ranks and {self.gpus_per_node} GPUs"
        return f"{self.partition or 'default'}, {sizes} per node"

    @cached_property
    def pairs(self) -> list[Pair]:
        """The measured pairs of nodes."""
        return [from_json(Pair, record) for record in self.measured.get("pairs", ())]

    def nodes_of(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """The nodes of ranks that left a record, each once."""
        return tuple(dict.fromkeys(self.records[rank].node for rank in ranks))

    @property
    def incomplete_nodes(self) -> tuple[str, ...]:
        """The nodes on which ranks left no record."""
        recorded = Counter(record.node for record in self.records.values())
        return tuple(node for node in self.job.rank_nodes if recorded[node] < self.processes_per_node)


def figures(answers: RankAnswers) -> dict[str, float]:
    """Return the figures to compare with a baseline: seconds, whose names end with `_s`, and rates per second."""
    values: dict[str, float] = {}
    if pairs := answers.pairs:
        values["pair_bandwidth"] = min(pair.bytes_per_s for pair in pairs)
        values["pair_latency_s"] = max(pair.best_latency_s for pair in pairs)
    for reduction in answers.measured.get("reductions", ()):
        # the largest one comes last
        if reduction["bytes"] < SMALL_BYTES:
            values[f"{reduction['backend']}_all_reduce_s"] = reduction["seconds"]
        else:
            values[f"{reduction['backend']}_all_reduce_bandwidth"] = reduction["bytes"] / reduction["seconds"]
    for name, attribute in (("device_flops", "flops_per_s"), ("disk_bandwidth", "write_bytes_per_s")):
        if rates := [rate for record in answers.records.values() if (rate := getattr(record, attribute))]:
            values[name] = statistics.median(rates)
    return values


def measured_lines(answers: RankAnswers, named_figures: Mapping[str, float]) -> Iterator[str]:
    """Yield a line for the reader on each kind of measurement.

    Args:
        answers: of the job.
        named_figures: their `figures`.
    """
    for reduction in answers.measured.get("reductions", ()):
        size, seconds = reduction["bytes"], reduction["seconds"]
        rate = f", {scaled(size / seconds, 'B')}/s" if size > SMALL_BYTES else ""
        yield f"all-reduce of {scaled(size, 'B')} over {reduction['backend']}: {brief_time(seconds)}{rate}"
    if pairs := answers.pairs:
        worst = min(pairs, key=lambda pair: pair.bytes_per_s)
        yield (
            f"{counted(len(pairs), 'pair')} of nodes: at least {scaled(worst.bytes_per_s, 'B')}/s "
            f"({worst.first} and {worst.second}), at most {brief_time(named_figures['pair_latency_s'])} one way"
        )
    if "disk_bandwidth" in named_figures:
        yield f"each node writes {scaled(named_figures['disk_bandwidth'], 'B')}/s to the run directory"


def compare_with_baseline(
    path: Path, request: str, now: Mapping[str, float], *, renew: bool, explained: bool = False
) -> list[Finding]:
    """Compare figures with the stored ones, or store them if there are none.

    Args:
        path: of the baseline.
        request: `RankAnswers.request`.
        now: the new figures.
        renew: replace the stored ones.
        explained: whether a finding on the network explains why that is slow already.
    """
    stored: dict[str, Any] = read_json_or_empty(path)
    before = stored.get(request)
    if not isinstance(before, dict) or describe_wrong_field(before, _BASELINE, tuple(_BASELINE)) or renew:
        try:
            write_json(path, {**stored, request: {"time": time.time(), "figures": dict(now)}})
        except OSError as error:
            finding = Finding(
                check="baseline",
                severity=Severity.WARNING,
                problem=f"{path} can't be written: {error.strerror or error}",
                why="later examinations compare their figures with those in it",
                remedy=f"make room or correct the permissions; if {path} isn't a file, move it away",
            )
            return [finding]
        return []
    day = time.strftime("%Y-%m-%d", time.localtime(before["time"]))
    compared = {name: value for name, value in now.items() if not (explained and name.startswith(OF_NETWORK))}
    return [
        Finding(
            check="baseline",
            severity=Severity.WARNING,
            problem=f"{problem} on {day}",
            why="something on the cluster has become slower, or other jobs take part of it now",
            remedy="examine again later; if it stays so, ask the administrators, or accept it with --new-baseline "
            f"(the earlier figures are in {path})",
        )
        for problem in _much_worse(before["figures"], compared)
    ]


def _much_worse(before: Mapping[str, float], now: Mapping[str, float]) -> Iterator[str]:
    """Describe the figures that are much worse than before."""
    for name, value in now.items():
        earlier = before.get(name)
        if not earlier or not value:
            continue
        lower = name.endswith(LOWER_IS_BETTER)
        ratio = max(value, SHORT_S) / max(earlier, SHORT_S) if lower else earlier / value
        if ratio < next((factor for ending, factor in WORSE.items() if name.endswith(ending)), USUALLY_WORSE):
            continue
        unit = "FLOP" if "flops" in name else "B"
        texts = [brief_time(figure) if lower else f"{scaled(figure, unit)}/s" for figure in (value, earlier)]
        yield f"{name.removesuffix(LOWER_IS_BETTER).replace('_', ' ')}: {texts[0]}, was {texts[1]}"

"""What the records of the ranks, and their measurements, mean."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.doctor.finding import Finding, Severity
from hpctrain.doctor.job_record import JobRecord
from hpctrain.doctor.pairs import SLOW, Pair, losing_pairs, nodes_at_fault, slow_pairs
from hpctrain.phrases import listed, numbered, scaled

SLOW_NETWORK = 100e6
"""Bytes per second below which any network between nodes is slow: less than a gigabit."""
SLOW_DEVICE = 2.0
"""A device is slow if others are this many times faster."""
HOT = 90
"""Degrees Celsius near which GPUs lower their clocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAnswers:
    """What the second step of the job left.

    Attributes:
        job: the record of the batch script.
        records: of the ranks, by rank.
        measured: what they measured together; empty if they didn't come that far.
        processes_per_node: ranks on each node.
        gpus_per_node: that the request asks for.
        interface: `cluster.network_interface`.
    """

    job: JobRecord
    records: Mapping[int, Mapping[str, Any]]
    measured: Mapping[str, Any]
    processes_per_node: int
    gpus_per_node: int
    interface: str | None

    @property
    def world_size(self) -> int:
        """The number of ranks that were started."""
        return len(self.job.rank_nodes) * self.processes_per_node

    @property
    def pairs(self) -> list[Pair]:
        """The measured pairs of nodes."""
        return [Pair.from_record(record) for record in self.measured.get("pairs", ())]

    def node_of(self, rank: int) -> str:
        """The node of a rank, by its own record, or else by the usual distribution."""
        if rank in self.records:
            return str(self.records[rank]["node"])
        return self.job.rank_nodes[rank // self.processes_per_node]


def rank_findings(answers: RankAnswers) -> list[Finding]:
    """Find out what is wrong with the ranks, the devices and the network."""
    if not answers.job.rank_nodes:
        return []
    return [
        *_unstarted(answers),
        *_names_of_nodes(answers),
        *_failed(answers),
        *_unfinished(answers),
        *_devices(answers),
        *_gpus(answers),
        *_network(answers),
        *_slow_devices(answers),
        *_slow_disks(answers),
    ]


def _unstarted(answers: RankAnswers) -> Iterator[Finding]:
    missing = [rank for rank in range(answers.world_size) if rank not in answers.records]
    if not missing:
        return
    nodes = tuple(dict.fromkeys(map(answers.node_of, missing)))
    said = "; ".join(answers.job.complaints.get("ranks", [])[:4])
    yield Finding(
        check="ranks",
        severity=Severity.ERROR,
        problem=f"{numbered('rank', missing)} on {listed(nodes)} didn't start{': ' if said else ''}{said}",
        why="the others would wait for them",
        remedy="see logs/ in the folder of this examination; a step that can't be made is refused by SLURM: compare "
        "cluster.cpus_per_process, cluster.memory_gb and cluster.srun_args with what a node has",
        nodes=nodes,
    )


def _names_of_nodes(answers: RankAnswers) -> Iterator[Finding]:
    """Find nodes whose own name is a loopback address, as Debian's installer writes it into /etc/hosts."""
    if answers.interface is not None or len(answers.job.rank_nodes) < 2:
        return
    leaders = {str(record["node"]): record for record in answers.records.values()}
    bad = tuple(node for node, record in leaders.items() if str(record.get("own_address", "")).startswith("127."))
    if bad:
        known = next((one["name"] for one in leaders[bad[0]].get("interfaces", ()) if one["address"]), "eth0")
        yield Finding(
            check="interface",
            severity=Severity.ERROR,
            problem=f"{listed(bad)}: the node's own name stands for {leaders[bad[0]]['own_address']}, "
            "which others can't reach",
            why="gloo and NCCL listen at that address",
            remedy=f"set cluster.network_interface={known}",
            nodes=bad,
        )


def _failed(answers: RankAnswers) -> Iterator[Finding]:
    """The errors of ranks, each once, with all nodes where it was seen."""
    by_error: dict[str, list[int]] = {}
    for rank, record in sorted(answers.records.items()):
        if record.get("error"):
            by_error.setdefault(str(record["error"]), []).append(rank)
    for error, ranks in list(by_error.items())[:4]:
        nodes = tuple(dict.fromkeys(map(answers.node_of, ranks)))
        stage = answers.records[ranks[0]]["stage"]
        yield Finding(
            check="ranks",
            severity=Severity.ERROR,
            problem=f"{numbered('rank', ranks)} on {listed(nodes)} failed when it {stage}: {error}",
            why="a run would fail in the same way",
            remedy="see logs/ in the folder of this examination; `srun python -m hpctrain env` shows its place",
            nodes=nodes,
        )


def _unfinished(answers: RankAnswers) -> Iterator[Finding]:
    late = "ranks" in answers.job.late
    stuck = [
        rank
        for rank, record in sorted(answers.records.items())
        if record["stage"] != "done" and not record.get("error")
    ]
    failed = any(record.get("error") for record in answers.records.values())
    missing = len(answers.records) < answers.world_size
    if not stuck or failed or (missing and not late):
        return
    nodes = tuple(dict.fromkeys(map(answers.node_of, stuck)))
    stage = answers.records[stuck[0]]["stage"]
    said = "; ".join(answers.job.complaints.get("ranks", [])[:4])
    yield Finding(
        check="ranks",
        severity=Severity.ERROR,
        problem=f"{numbered('rank', stuck)} on {listed(nodes)} stopped without an error when it {stage}"
        f"{': ' if said else ''}{said}",
        why="a run would hang, or fail, in the same way",
        remedy="see logs/ in the folder of this examination",
        nodes=nodes,
    )


def _devices(answers: RankAnswers) -> Iterator[Finding]:
    if not answers.gpus_per_node:
        return
    without = tuple(
        dict.fromkeys(
            str(record["node"])
            for record in answers.records.values()
            if any(not device.startswith("cuda") for device in record.get("devices", ()))
        )
    )
    if without:
        yield Finding(
            check="devices",
            severity=Severity.ERROR,
            problem=f"{listed(without)}: torch finds no GPU, though {answers.gpus_per_node} per node were requested",
            why="a run trains on the CPU there, or is refused",
            remedy="install a build of torch for a version of CUDA that the driver supports; nvidia-smi shows which",
            nodes=without,
        )
    blocked = {
        str(record["node"]): record["no_peer_access"]
        for record in answers.records.values()
        if record.get("no_peer_access")
    }
    for node, pairs in blocked.items():
        yield Finding(
            check="gpus",
            severity=Severity.WARNING,
            problem=f"{node}: GPUs can't reach each other's memory: {', '.join(f'{a} and {b}' for a, b in pairs[:4])}",
            why="NCCL copies through the host's memory",
            remedy="ask whether that is intended: PCIe access control (ACS, IOMMU) prevents it",
            nodes=(node,),
        )


def _gpus(answers: RankAnswers) -> Iterator[Finding]:
    drivers: dict[str, list[str]] = {}
    for record in answers.records.values():
        node = str(record["node"])
        if record.get("smi_problem") and answers.gpus_per_node:
            yield Finding(
                check="gpus",
                severity=Severity.ERROR,
                problem=f"{node}: nvidia-smi fails: {record['smi_problem']}",
                why="the driver doesn't answer, so a run can't use the GPUs",
                remedy=f"set cluster.exclude={node}, and tell the cluster's administrators",
                nodes=(node,),
            )
        for gpu in record.get("gpus", ()):
            drivers.setdefault(gpu["driver"], [])
            if node not in drivers[gpu["driver"]]:
                drivers[gpu["driver"]].append(node)
            yield from _gpu(node, gpu)
    by_driver = [f"{version} on {listed(nodes)}" for version, nodes in drivers.items()]
    if len(by_driver) > 1:
        yield Finding(
            check="gpus",
            severity=Severity.WARNING,
            problem=f"the nodes have different drivers: {'; '.join(by_driver)}",
            why="NCCL may choose other algorithms, and a run that moves between them may not be equal bit for bit",
            remedy="choose nodes of one kind with cluster.constraint",
        )


def _gpu(node: str, gpu: Mapping[str, str]) -> Iterator[Finding]:
    name = f"{node}, GPU {gpu['index']} ({gpu['name']})"
    exclude = f"set cluster.exclude={node}, and tell the cluster's administrators"
    if gpu["ecc_errors"].isdecimal() and int(gpu["ecc_errors"]):
        yield Finding(
            check="gpus",
            severity=Severity.ERROR,
            problem=f"{name}: {gpu['ecc_errors']} memory errors that couldn't be corrected",
            why="results may be wrong, and the next such error ends the run",
            remedy=exclude,
            nodes=(node,),
        )
    slowed = [
        what.replace("_", " ")
        for what in ("hardware_slowdown", "thermal_slowdown", "power_brake")
        if gpu[what] == "Active"
    ]
    hot = gpu["temperature"].isdecimal() and int(gpu["temperature"]) >= HOT
    if slowed or hot:
        yield Finding(
            check="gpus",
            severity=Severity.WARNING,
            problem=f"{name}: {', '.join(slowed) or 'hot'} at {gpu['temperature']} degrees",
            why="all ranks wait for the slowest one",
            remedy=exclude,
            nodes=(node,),
        )


def _network(answers: RankAnswers) -> Iterator[Finding]:
    pairs = answers.pairs
    if not pairs:
        return
    lossy, slow = losing_pairs(pairs), slow_pairs(pairs)
    if len(pairs) < 3:
        slow = [pair for pair in pairs if pair.bytes_per_s < SLOW_NETWORK]
    median = statistics.median(pair.bytes_per_s for pair in pairs)
    yield from _blamed("loses packets", lossy, pairs, _losses, "all ranks wait until what was lost has been sent again")
    # a link that loses packets is slow for that reason
    known = {pair.nodes for pair in lossy}
    slow = [pair for pair in slow if pair.nodes not in known]
    yield from _blamed("is slow", slow, pairs, _speeds, "all ranks wait for the slowest one")
    if median < SLOW_NETWORK and not slow and not lossy:
        nodes = tuple(dict.fromkeys(node for pair in pairs for node in pair.nodes))
        yield Finding(
            check="network",
            severity=Severity.WARNING,
            problem=f"the network between the nodes carries {scaled(median, 'B')}/s",
            why="ranks exchange the gradients of each step over it",
            remedy="set cluster.network_interface to a faster one, if the nodes have one",
            nodes=nodes,
        )


def _blamed(what: str, bad: Sequence[Pair], pairs: Sequence[Pair], describe: Any, why: str) -> Iterator[Finding]:
    """Findings on the nodes that explain bad pairs, and on the pairs that no node explains."""
    nodes = nodes_at_fault(bad, pairs)
    for node in nodes:
        own = [pair for pair in bad if node in pair.nodes]
        yield Finding(
            check="network",
            severity=Severity.WARNING,
            problem=f"{node}: its network {what}: {describe(own, pairs)}",
            why=why,
            remedy=f"set cluster.exclude={node}, and tell the cluster's administrators",
            nodes=(node,),
        )
    for pair in bad:
        if not set(pair.nodes) & set(nodes):
            yield Finding(
                check="network",
                severity=Severity.WARNING,
                problem=f"{pair.first} and {pair.second}: the network between them {what}: {describe([pair], pairs)}",
                why=why,
                remedy="examine again with more nodes, which tells whose link it is",
                nodes=pair.nodes,
            )


def _losses(bad: Sequence[Pair], pairs: Sequence[Pair]) -> str:  # noqa: ARG001 - as `_speeds`
    sent = sum(pair.first_sent + pair.second_sent for pair in bad)
    repeated = sum(pair.repeated for pair in bad)
    return f"{repeated} of {sent} TCP segments were sent again"


def _speeds(bad: Sequence[Pair], pairs: Sequence[Pair]) -> str:
    worst = min(bad, key=lambda pair: pair.bytes_per_s)
    text = f"{scaled(worst.bytes_per_s, 'B')}/s, {worst.best_latency_s * 1e6:.0f} us"
    others = [pair for pair in pairs if pair not in bad]
    if not others:
        return text
    usual = statistics.median(pair.bytes_per_s for pair in others)
    latency = statistics.median(pair.best_latency_s for pair in others)
    return f"{text} (between the others {scaled(usual, 'B')}/s, {latency * 1e6:.0f} us)"


def _slow_devices(answers: RankAnswers) -> Iterator[Finding]:
    rates = {rank: record["flops_per_s"] for rank, record in answers.records.items() if record.get("flops_per_s")}
    if len(rates) < 3:
        return
    median = statistics.median(rates.values())
    slow = [rank for rank, rate in sorted(rates.items()) if rate < median / SLOW_DEVICE]
    for node in dict.fromkeys(map(answers.node_of, slow)):
        own = [rank for rank in slow if answers.node_of(rank) == node]
        worst = min(rates[rank] for rank in own)
        yield Finding(
            check="speed",
            severity=Severity.WARNING,
            problem=f"{node}: {numbered('rank', own)}: {scaled(worst, 'FLOP')}/s of matrix multiplications, "
            f"the median of all ranks is {scaled(median, 'FLOP')}/s",
            why="all ranks wait for the slowest one",
            remedy=f"set cluster.exclude={node}; or, if other processes share its cores, cluster.cpus_per_process or "
            "cluster.sbatch.exclusive=true",
            nodes=(node,),
        )


def _slow_disks(answers: RankAnswers) -> Iterator[Finding]:
    rates = {
        str(record["node"]): record["write_bytes_per_s"]
        for record in answers.records.values()
        if record.get("write_bytes_per_s")
    }
    if len(rates) < 3:
        return
    median = statistics.median(rates.values())
    for node, rate in rates.items():
        if rate < median / SLOW:
            yield Finding(
                check="disk",
                severity=Severity.WARNING,
                problem=f"{node} writes {scaled(rate, 'B')}/s to the run directory, "
                f"the median of all nodes is {scaled(median, 'B')}/s",
                why="a save takes as long as its slowest writer",
                remedy=f"set cluster.exclude={node}, and tell the cluster's administrators",
                nodes=(node,),
            )

"""What the records of the ranks, and their measurements, mean."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpctrain.doctor.finding import EXCLUDE, Case, Check, Severity, when
from hpctrain.doctor.folder import RankRecord
from hpctrain.doctor.measurements import SLOW, Pair, RankAnswers, nodes_at_fault, slow_pairs
from hpctrain.phrases import brief_time, listed, numbered, scaled

MOST_ERRORS = 4
"""Different errors that are named."""
SLOW_DEVICE = 2.0
"""A device is slow if others are this many times faster."""
HOT = 90
"""Degrees Celsius near which GPUs lower their clocks."""
SLOW_NETWORK = 100e6
"""Bytes per second below which any network between nodes is slow: less than a gigabit."""
FASTER = 10
"""An interface that is this many times as fast as what was measured isn't the one that was used."""
VIRTUAL = ("docker", "virbr", "veth", "br-", "usb", "cni", "tun", "tap")
"""Beginnings of the names of interfaces that don't lead to other nodes."""
MOST_PAIRS = 8
"""Pairs that are named one by one."""


def _with_complaints(answers: RankAnswers, *first: str) -> str:
    """What srun and logs said, after a colon; empty if they said nothing."""
    lines = [*first, *answers.job.complaints.get("ranks", [])[:4]]
    return f": {'; '.join(lines)}" if lines else ""


def _unstarted(answers: RankAnswers) -> list[Case]:
    missing = [rank for rank in range(answers.world_size) if rank not in answers.records]
    message = _with_complaints(answers, *[*answers.last_lines.values()][:1])
    return when(missing, ranks=numbered("rank", missing), message=message, nodes=answers.incomplete_nodes)


def _own_names(answers: RankAnswers) -> list[Case]:
    """Find nodes whose own name is a loopback address, as Debian's installer writes it into /etc/hosts."""
    met = any(record.met for record in answers.records.values())
    if answers.interface is not None or len(answers.job.rank_nodes) < 2 or met:
        return []
    leaders = {record.node: record for record in answers.records.values()}
    bad = [record for record in leaders.values() if record.own_address.startswith("127.")]
    if not bad:
        return []
    interface = next((interface["name"] for interface in _usable_interfaces(bad[0])), "NAME")
    return [{"address": bad[0].own_address, "interface": interface, "nodes": [record.node for record in bad]}]


def _usable_interfaces(record: RankRecord) -> list[Mapping[str, Any]]:
    """The interfaces of a rank's node that have an address and may lead to other nodes, the fastest first."""
    usable = (one for one in record.interfaces if one["address"] and not one["name"].startswith(VIRTUAL))
    return sorted(usable, key=lambda interface: -interface["mbit_per_s"])


def _failed(answers: RankAnswers) -> Iterator[Case]:
    """The errors of ranks, each once, with all nodes where it was seen."""
    by_error: dict[str, list[int]] = {}
    for rank, record in sorted(answers.records.items()):
        if record.error:
            by_error.setdefault(record.error, []).append(rank)
    for error, ranks in list(by_error.items())[:MOST_ERRORS]:
        stage = answers.records[ranks[0]].stage
        nodes = answers.nodes_of(ranks)
        yield {"ranks": numbered("rank", ranks), "stage": stage, "error": error, "nodes": nodes}


def _unfinished(answers: RankAnswers) -> list[Case]:
    stuck = [rank for rank, record in sorted(answers.records.items()) if not record.has_ended]
    failed = any(record.error for record in answers.records.values())
    missing = len(answers.records) < answers.world_size
    if not stuck or failed or (missing and "ranks" not in answers.job.late):
        return []
    stage = f"{answers.records[stuck[0]].stage}{_with_complaints(answers)}"
    return [{"ranks": numbered("rank", stuck), "stage": stage, "nodes": answers.nodes_of(stuck)}]


def _without_gpu(answers: RankAnswers) -> list[Case]:
    without = [
        rank
        for rank, record in answers.records.items()
        if any(not device.startswith("cuda") for device in record.devices)
    ]
    return when(answers.gpus_per_node and without, nodes=answers.nodes_of(without))


def _no_peer_access(answers: RankAnswers) -> Iterator[Case]:
    blocked = {record.node: record.no_peer_access for record in answers.records.values() if record.no_peer_access}
    for node, pairs in blocked.items():
        yield from when(answers.gpus_per_node, pairs=", ".join(f"{a} and {b}" for a, b in pairs[:4]), nodes=[node])


def _smi_problems(answers: RankAnswers) -> Iterator[Case]:
    for record in answers.records.values():
        yield from when(record.smi_problem and answers.gpus_per_node, error=record.smi_problem, nodes=[record.node])


def _memory_errors(answers: RankAnswers) -> Iterator[Case]:
    for node, gpu in _gpus(answers):
        yield from when(gpu["ecc_errors"].isdecimal() and int(gpu["ecc_errors"]), gpu=gpu, nodes=[node])


def _slowed(answers: RankAnswers) -> Iterator[Case]:
    for node, gpu in _gpus(answers):
        reasons = ("hardware_slowdown", "thermal_slowdown", "power_brake")
        slowed = [reason.replace("_", " ") for reason in reasons if gpu[reason] == "Active"]
        hot = gpu["temperature"].isdecimal() and int(gpu["temperature"]) >= HOT
        yield from when(slowed or hot, gpu=gpu, state=", ".join(slowed) or "hot", nodes=[node])


def _gpus(answers: RankAnswers) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Each GPU that nvidia-smi reported, with its node."""
    return ((record.node, gpu) for record in answers.records.values() for gpu in record.gpus)


def _drivers(answers: RankAnswers) -> list[Case]:
    drivers: dict[str, dict[str, None]] = {}
    for node, gpu in _gpus(answers):
        drivers.setdefault(gpu["driver"], {})[node] = None
    versions = [f"{version} on {listed(nodes)}" for version, nodes in drivers.items()]
    return when(len(versions) > 1, versions="; ".join(versions))


def _links(answers: RankAnswers, whose: str) -> Iterator[Case]:
    """Links that lose packets, then those that are slow.

    Args:
        answers: of the job.
        whose: the links of `all` nodes, those of one `node`, or one link between a `pair` of nodes.
    """
    pairs = answers.pairs
    lossy, slow = _lossy_and_slow(pairs)
    for nodes, bad in _blame(lossy, pairs).get(whose, ()):
        sent = sum(pair.first_sent + pair.second_sent for pair in bad)
        fault = f"loses packets: {sum(pair.repeated for pair in bad)} of {sent} TCP segments were sent again"
        why = "all ranks wait until what was lost has been sent again"
        yield {"fault": fault, "why": why, "names": nodes, "nodes": nodes}
    for nodes, bad in _blame(slow, pairs).get(whose, ()):
        fault, why = f"is slow: {_speeds(bad, pairs)}", "all ranks wait for the slowest one"
        yield {"fault": fault, "why": why, "names": nodes, "nodes": nodes}


def _lossy_and_slow(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """The pairs that lose packets, and the others that are slow: a link that loses packets is slow for that reason."""
    slow = slow_pairs(pairs) if len(pairs) > 2 else [pair for pair in pairs if pair.bytes_per_s < SLOW_NETWORK]
    return [pair for pair in pairs if pair.loses], [pair for pair in slow if not pair.loses]


def _blame(bad: Sequence[Pair], pairs: Sequence[Pair]) -> dict[str, list[tuple[Sequence[str], Sequence[Pair]]]]:
    """The nodes that explain bad pairs, and the pairs that no node explains, each with its bad pairs."""
    nodes = nodes_at_fault(bad, pairs)
    if len(pairs) > 1 and {node for pair in pairs for node in pair.nodes} == set(nodes):
        return {"all": [(nodes, bad)]}
    return {
        "node": [([node], [pair for pair in bad if node in pair.nodes]) for node in nodes],
        "pair": [(pair.nodes, [pair]) for pair in bad[:MOST_PAIRS] if not set(pair.nodes) & set(nodes)],
    }


def _speeds(bad: Sequence[Pair], pairs: Sequence[Pair]) -> str:
    worst = min(bad, key=lambda pair: pair.bytes_per_s)
    text = f"{scaled(worst.bytes_per_s, 'B')}/s, {brief_time(worst.best_latency_s)}"
    others = [pair for pair in pairs if pair not in bad]
    if not others:
        return text
    usual = statistics.median(pair.bytes_per_s for pair in others)
    latency = statistics.median(pair.best_latency_s for pair in others)
    return f"{text} (between the others {scaled(usual, 'B')}/s, {brief_time(latency)})"


def _slow_network(answers: RankAnswers, *, has_faster: bool) -> list[Case]:
    """The network between all nodes is slow, or much slower than an interface that wasn't chosen."""
    pairs = answers.pairs
    if not pairs or any(_lossy_and_slow(pairs)):
        return []
    median = statistics.median(pair.bytes_per_s for pair in pairs)
    interfaces = [interface for record in answers.records.values() for interface in _usable_interfaces(record)[:1]]
    none: Mapping[str, Any] = {"name": "", "mbit_per_s": 0}
    fastest = max(interfaces, key=lambda interface: interface["mbit_per_s"], default=none)
    is_faster = (
        answers.interface is None
        and bool(fastest["mbit_per_s"])
        and (fastest["mbit_per_s"] * 1e6 / 8 >= FASTER * median)
    )
    return when(
        is_faster is has_faster and (is_faster or median < SLOW_NETWORK),
        rate=scaled(median, "B"),
        interface=fastest["name"],
        gbit_per_s=fastest["mbit_per_s"] / 1000,
        nodes=dict.fromkeys(node for pair in pairs for node in pair.nodes),
    )


def _slow_devices(answers: RankAnswers) -> Iterator[Case]:
    rates = {rank: record.flops_per_s for rank, record in answers.records.items() if record.flops_per_s}
    if len(rates) < 3:
        return
    median = statistics.median(rates.values())
    slow = [rank for rank, rate in sorted(rates.items()) if rate < median / SLOW_DEVICE]
    for node in answers.nodes_of(slow):
        ranks = [rank for rank in slow if answers.records[rank].node == node]
        rate = scaled(min(rates[rank] for rank in ranks), "FLOP")
        yield {"ranks": numbered("rank", ranks), "rate": rate, "median": scaled(median, "FLOP"), "nodes": [node]}


def _slow_disks(answers: RankAnswers) -> Iterator[Case]:
    records = answers.records.values()
    rates = {record.node: record.write_bytes_per_s for record in records if record.write_bytes_per_s}
    if len(rates) < 3:
        return
    median = statistics.median(rates.values())
    for node, rate in rates.items():
        yield from when(rate < median / SLOW, rate=scaled(rate, "B"), median=scaled(median, "B"), nodes=[node])


RANK_CHECKS: tuple[Check[RankAnswers], ...] = (
    Check(
        "ranks",
        Severity.ERROR,
        _unstarted,
        problem="{ranks} on {nodes} didn't start{message}",
        why="the others would wait for them",
        remedy="see logs/ in the folder of this examination; a step that can't be made is refused by SLURM: compare "
        "cluster.cpus_per_process, cluster.memory_gb and cluster.srun_args with what a node has",
    ),
    Check(
        "interface",
        Severity.ERROR,
        _own_names,
        problem="{nodes}: the node's own name resolves to {address}, which others can't reach",
        why="gloo and NCCL listen at that address",
        remedy="set cluster.network_interface={interface}",
    ),
    Check(
        "ranks",
        Severity.ERROR,
        _failed,
        problem="{ranks} on {nodes} failed while {stage}: {error}",
        why="a run would fail in the same way",
        remedy="see logs/ in the folder of this examination",
    ),
    Check(
        "ranks",
        Severity.ERROR,
        _unfinished,
        problem="{ranks} on {nodes} stopped without an error while {stage}",
        why="a run would hang, or fail, in the same way",
        remedy="see logs/ in the folder of this examination",
    ),
    Check(
        "devices",
        Severity.ERROR,
        _without_gpu,
        problem="{nodes}: torch finds no GPU, though {measured.gpus_per_node} per node were requested",
        why="a run trains on the CPU there, or is refused",
        remedy="install a build of torch for a version of CUDA that the driver supports; nvidia-smi shows which",
    ),
    Check(
        "gpus",
        Severity.WARNING,
        _no_peer_access,
        problem="{nodes}: GPUs can't reach each other's memory: {pairs}",
        why="NCCL copies through the host's memory",
        remedy="ask whether that is intended: PCIe access control (ACS, IOMMU) prevents it",
    ),
    Check(
        "gpus",
        Severity.WARNING,
        _smi_problems,
        problem="{nodes}: nvidia-smi fails: {error}",
        why="the GPUs' health isn't known, even if torch uses them",
        remedy=EXCLUDE,
    ),
    Check(
        "gpus",
        Severity.WARNING,
        _memory_errors,
        problem="{nodes}, GPU {gpu[index]} ({gpu[name]}): {gpu[ecc_errors]} uncorrected memory errors since the driver "
        "was loaded",
        why="such an error ends the process that uses the GPU; more of them mean that it is breaking",
        remedy=EXCLUDE,
    ),
    Check(
        "gpus",
        Severity.WARNING,
        _slowed,
        problem="{nodes}, GPU {gpu[index]} ({gpu[name]}): {state} at {gpu[temperature]} degrees",
        why="all ranks wait for the slowest one",
        remedy=EXCLUDE,
    ),
    Check(
        "gpus",
        Severity.WARNING,
        _drivers,
        problem="the nodes have different drivers: {versions}",
        why="NCCL may choose other algorithms, and a run that moves between them may not be equal bit for bit",
        remedy="choose nodes of one kind with cluster.constraint",
    ),
    Check(
        "network",
        Severity.WARNING,
        lambda answers: _links(answers, "all"),
        problem="the network between all nodes {fault}",
        why="{why}",
        remedy="set cluster.network_interface to another one, if the nodes have one",
    ),
    Check(
        "network",
        Severity.WARNING,
        lambda answers: _links(answers, "node"),
        problem="{nodes}: its network {fault}",
        why="{why}",
        remedy=EXCLUDE,
    ),
    Check(
        "network",
        Severity.WARNING,
        lambda answers: _links(answers, "pair"),
        problem="{names[0]} and {names[1]}: the network between them {fault}",
        why="{why}",
        remedy="examine again with more nodes, to find out whose link it is",
    ),
    Check(
        "network",
        Severity.WARNING,
        lambda answers: _slow_network(answers, has_faster=True),
        problem="the network between the nodes carries {rate}/s, but {interface} has {gbit_per_s:g} Gbit/s",
        why="ranks exchange the gradients of each step over it",
        remedy="set cluster.network_interface={interface}",
    ),
    Check(
        "network",
        Severity.WARNING,
        lambda answers: _slow_network(answers, has_faster=False),
        problem="the network between the nodes carries {rate}/s",
        why="ranks exchange the gradients of each step over it",
        remedy="set cluster.network_interface to a faster one, if the nodes have one",
    ),
    Check(
        "speed",
        Severity.WARNING,
        _slow_devices,
        problem="{nodes}: {ranks}: {rate}/s of matrix multiplications, the median of all ranks is {median}/s",
        why="all ranks wait for the slowest one",
        remedy="set cluster.exclude={exclude}; or, if other processes share its cores, cluster.cpus_per_process or "
        "cluster.sbatch.exclusive=true",
    ),
    Check(
        "disk",
        Severity.WARNING,
        _slow_disks,
        problem="{nodes} writes {rate}/s to the run directory, the median of all nodes is {median}/s",
        why="a save takes as long as its slowest writer",
        remedy=EXCLUDE,
    ),
)
"""What the records of the ranks mean; there are none where no ranks were started."""

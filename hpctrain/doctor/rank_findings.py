"""Findings on the records and the measurements of the ranks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpctrain.doctor.finding import Finding, Severity, exclude_remedy
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


def rank_findings(answers: RankAnswers) -> Iterator[Finding]:
    """Yield the findings on the records and measurements of the ranks."""
    yield from _unstarted_ranks(answers)
    yield from _own_names(answers)
    yield from _unfinished(answers)
    if answers.gpus_per_node:
        yield from _missing_gpus(answers)
        yield from _gpus_in_doubt(answers)
    yield from _bad_links(answers)
    yield from _slow_network(answers)
    yield from _slow_devices(answers)
    yield from _slow_disks(answers)


def _unstarted_ranks(answers: RankAnswers) -> Iterator[Finding]:
    missing = [rank for rank in range(answers.world_size) if rank not in answers.records]
    if not missing:
        return
    nodes = answers.incomplete_nodes
    lines = [*filter(None, [answers.last_line]), *answers.job.complaints.get("ranks", [])[:4]]
    yield Finding(
        check="ranks",
        problem=f"{numbered('rank', missing)} on {listed(nodes)} didn't start{_after_colon(lines)}",
        why="the others would wait for them",
        remedy="see logs/ in the folder of this examination; a step that can't be made is refused by SLURM: compare "
        "cluster.cpus_per_process, cluster.memory_gb and cluster.srun_args with what a node has",
        nodes=nodes,
    )


def _after_colon(lines: Sequence[str]) -> str:
    return f": {'; '.join(lines)}" if lines else ""


def _own_names(answers: RankAnswers) -> Iterator[Finding]:
    """Find nodes whose own name is a loopback address, as Debian's installer writes it into /etc/hosts."""
    met = any(record.met for record in answers.records.values())
    if answers.interface is not None or len(answers.job.rank_nodes) < 2 or met:
        return
    leaders = {record.node: record for record in answers.records.values()}
    if bad := [record for record in leaders.values() if record.own_address.startswith("127.")]:
        nodes = tuple(record.node for record in bad)
        interface = next((interface["name"] for interface in _usable_interfaces(bad[0])), "NAME")
        address = bad[0].own_address
        yield Finding(
            check="interface",
            problem=f"{listed(nodes)}: the node's own name resolves to {address}, which others can't reach",
            why="gloo and NCCL listen at that address",
            remedy=f"set cluster.network_interface={interface}",
            nodes=nodes,
        )


def _usable_interfaces(record: RankRecord) -> list[Mapping[str, Any]]:
    """The interfaces of a rank's node that have an address and may lead to other nodes, the fastest first."""
    interfaces = sorted(record.interfaces, key=lambda interface: -interface["mbit_per_s"])
    return [card for card in interfaces if card["address"] and not card["name"].startswith(VIRTUAL)]


def _unfinished(answers: RankAnswers) -> Iterator[Finding]:
    """The errors of ranks, each once, with all nodes where it was seen; without one, the ranks that didn't finish."""
    by_error: dict[str, list[int]] = {}
    for rank, record in sorted(answers.records.items()):
        if record.error or not record.has_ended:
            by_error.setdefault(record.error, []).append(rank)
    stuck = by_error.pop("", [])
    for error, ranks in list(by_error.items())[:MOST_ERRORS]:
        yield _unfinished_ranks(answers, ranks, "failed", f": {error}", "a run would fail in the same way")
    missing = len(answers.records) < answers.world_size
    if stuck and not by_error and (not missing or "ranks" in answers.job.late):
        complaints = _after_colon(answers.job.complaints.get("ranks", [])[:4])
        why = "a run would hang, or fail, in the same way"
        yield _unfinished_ranks(answers, stuck, "stopped without an error", complaints, why)


def _unfinished_ranks(answers: RankAnswers, ranks: Sequence[int], end: str, cause: str, why: str) -> Finding:
    nodes = answers.nodes_of(ranks)
    return Finding(
        check="ranks",
        problem=f"{numbered('rank', ranks)} on {listed(nodes)} {end} while {answers.records[ranks[0]].stage}{cause}",
        why=why,
        remedy="see logs/ in the folder of this examination",
        nodes=nodes,
    )


def _missing_gpus(answers: RankAnswers) -> Iterator[Finding]:
    records = answers.records.items()
    without = [rank for rank, record in records if not all(name.startswith("cuda") for name in record.devices)]
    if nodes := answers.nodes_of(without):
        yield Finding(
            check="devices",
            problem=f"{listed(nodes)}: torch finds no GPU, though {answers.gpus_per_node} per node were requested",
            why="a run trains on the CPU there, or is refused",
            remedy="install a build of torch for a version of CUDA that the driver supports; nvidia-smi shows which",
            nodes=nodes,
        )


def _gpus_in_doubt(answers: RankAnswers) -> Iterator[Finding]:
    """GPUs that work, and may be slow, or about to break."""
    drivers: dict[str, dict[str, None]] = {}
    for record in answers.records.values():
        if record.smi_problem:
            why = "the GPUs' health isn't known, even if torch uses them"
            yield _warning("gpus", record.node, f": nvidia-smi fails: {record.smi_problem}", why)
        for gpu in record.gpus:
            drivers.setdefault(gpu["driver"], {})[record.node] = None
            name = f", GPU {gpu['index']} ({gpu['name']}): "
            if gpu["ecc_errors"].isdecimal() and int(gpu["ecc_errors"]):
                problem = f"{name}{gpu['ecc_errors']} uncorrected memory errors since the driver was loaded"
                why = "such an error ends the process that uses the GPU; more of them mean that it is breaking"
                yield _warning("gpus", record.node, problem, why)
            if state := _slowdown(gpu):
                problem = f"{name}{state} at {gpu['temperature']} degrees"
                yield _warning("gpus", record.node, problem, "all ranks wait for the slowest one")
    if len(drivers) > 1:
        versions = "; ".join(f"{version} on {listed(nodes)}" for version, nodes in drivers.items())
        yield Finding(
            check="gpus",
            severity=Severity.WARNING,
            problem=f"the nodes have different drivers: {versions}",
            why="NCCL may choose other algorithms, and a run that moves between them may not be equal bit for bit",
            remedy="choose nodes of one kind with cluster.constraint",
        )


def _warning(check: str, node: str, problem: str, why: str, remedy: str = "") -> Finding:
    """A warning about one node; without another remedy, it advises to leave the node out."""
    return Finding(
        check=check,
        severity=Severity.WARNING,
        problem=f"{node}{problem}",
        why=why,
        remedy=remedy or exclude_remedy([node]),
        nodes=(node,),
    )


def _slowdown(gpu: Mapping[str, str]) -> str:
    """Return the reason for which a GPU has lowered its clocks, or may soon; empty if nothing suggests it."""
    reasons = ("hardware_slowdown", "thermal_slowdown", "power_brake")
    is_hot = gpu["temperature"].isdecimal() and int(gpu["temperature"]) >= HOT
    active = [reason.replace("_", " ") for reason in reasons if gpu[reason] == "Active"]
    return ", ".join(active) or ("hot" if is_hot else "")


def _bad_links(answers: RankAnswers) -> Iterator[Finding]:
    """Links that lose packets, then those that are slow: of all nodes, of one, or between two."""
    pairs = answers.pairs
    for bad in _lossy_and_slow(pairs):
        nodes = nodes_at_fault(bad, pairs)
        if len(pairs) > 1 and {node for pair in pairs for node in pair.nodes} == set(nodes):
            remedy = "set cluster.network_interface to another one, if the nodes have one"
            yield _bad_link("the network between all nodes", bad, pairs, remedy, nodes)
            continue
        for node in nodes:
            links = [pair for pair in bad if node in pair.nodes]
            yield _bad_link(f"{node}: its network", links, pairs, exclude_remedy([node]), [node])
        unexplained = [pair for pair in bad if not set(pair.nodes) & set(nodes)]
        for pair in unexplained[:MOST_PAIRS]:
            whose = f"{pair.first} and {pair.second}: the network between them"
            remedy = "examine again with more nodes, to find out whose link it is"
            yield _bad_link(whose, [pair], pairs, remedy, pair.nodes)


def _lossy_and_slow(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """The pairs that lose packets, and the others that are slow: a link that loses packets is slow for that reason."""
    slow = slow_pairs(pairs) if len(pairs) > 2 else [pair for pair in pairs if pair.bytes_per_s < SLOW_NETWORK]
    return [pair for pair in pairs if pair.loses], [pair for pair in slow if not pair.loses]


def _bad_link(whose: str, bad: Sequence[Pair], pairs: Sequence[Pair], remedy: str, nodes: Sequence[str]) -> Finding:
    if bad[0].loses:
        num_sent = sum(pair.first_sent + pair.second_sent for pair in bad)
        fault = f"loses packets: {sum(pair.repeated for pair in bad)} of {num_sent} TCP segments were sent again"
        why = "all ranks wait until what was lost has been sent again"
    else:
        fault, why = f"is slow: {_speeds(bad, pairs)}", "all ranks wait for the slowest one"
    return Finding(
        check="network",
        severity=Severity.WARNING,
        problem=f"{whose} {fault}",
        why=why,
        remedy=remedy,
        nodes=tuple(nodes),
    )


def _speeds(bad: Sequence[Pair], pairs: Sequence[Pair]) -> str:
    worst = min(bad, key=lambda pair: pair.bytes_per_s)
    text = f"{scaled(worst.bytes_per_s, 'B')}/s, {brief_time(worst.best_latency_s)}"
    other_pairs = [pair for pair in pairs if pair not in bad]
    if not other_pairs:
        return text
    usual = statistics.median(pair.bytes_per_s for pair in other_pairs)
    latency = statistics.median(pair.best_latency_s for pair in other_pairs)
    return f"{text} (between the others {scaled(usual, 'B')}/s, {brief_time(latency)})"


def _slow_network(answers: RankAnswers) -> Iterator[Finding]:
    """The network between all nodes is slow, or much slower than an interface that wasn't chosen."""
    pairs = answers.pairs
    if not pairs or any(_lossy_and_slow(pairs)):
        return
    bytes_per_s = statistics.median(pair.bytes_per_s for pair in pairs)
    interfaces = [interface for record in answers.records.values() for interface in _usable_interfaces(record)[:1]]
    none: Mapping[str, Any] = {"name": "", "mbit_per_s": 0}
    fastest = max(interfaces, key=lambda interface: interface["mbit_per_s"], default=none)
    speed = fastest["mbit_per_s"] * 1e6 / 8
    is_faster = answers.interface is None and speed > 0 and speed >= FASTER * bytes_per_s
    if not is_faster and bytes_per_s >= SLOW_NETWORK:
        return
    but, choice = "", " to a faster one, if the nodes have one"
    if is_faster:
        but = f", but {fastest['name']} has {fastest['mbit_per_s'] / 1000:g} Gbit/s"
        choice = f"={fastest['name']}"
    yield Finding(
        check="network",
        severity=Severity.WARNING,
        problem=f"the network between the nodes carries {scaled(bytes_per_s, 'B')}/s{but}",
        why="ranks exchange the gradients of each step over it",
        remedy=f"set cluster.network_interface{choice}",
        nodes=tuple(dict.fromkeys(node for pair in pairs for node in pair.nodes)),
    )


def _slow_devices(answers: RankAnswers) -> Iterator[Finding]:
    rates = {rank: record.flops_per_s for rank, record in answers.records.items() if record.flops_per_s}
    if len(rates) < 3:
        return
    median = statistics.median(rates.values())
    slow = [rank for rank, rate in sorted(rates.items()) if rate < median / SLOW_DEVICE]
    for node in answers.nodes_of(slow):
        ranks = [rank for rank in slow if answers.records[rank].node == node]
        rate = scaled(min(rates[rank] for rank in ranks), "FLOP")
        problem = (
            f": {numbered('rank', ranks)}: {rate}/s of matrix multiplications, the median of all ranks is "
            f"{scaled(median, 'FLOP')}/s"
        )
        remedy = (
            f"set cluster.exclude={node}; or, if other processes share its cores, cluster.cpus_per_process or "
            "cluster.sbatch.exclusive=true"
        )
        yield _warning("speed", node, problem, "all ranks wait for the slowest one", remedy)


def _slow_disks(answers: RankAnswers) -> Iterator[Finding]:
    records = answers.records.values()
    rates = {record.node: record.write_bytes_per_s for record in records if record.write_bytes_per_s}
    if len(rates) < 3:
        return
    median = statistics.median(rates.values())
    for node, rate in rates.items():
        if rate < median / SLOW:
            comparison = f"the median of all nodes is {scaled(median, 'B')}/s"
            problem = f" writes {scaled(rate, 'B')}/s to the run directory, {comparison}"
            yield _warning("disk", node, problem, "a save takes as long as its slowest writer")

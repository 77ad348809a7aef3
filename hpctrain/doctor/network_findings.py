"""What the measurements of the network between the nodes mean."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hpctrain.doctor.finding import Finding, Severity
from hpctrain.doctor.pairs import Pair, losing_pairs, nodes_at_fault, slow_pairs
from hpctrain.doctor.rank_answers import RankAnswers
from hpctrain.phrases import brief_time, scaled

SLOW_NETWORK = 100e6
"""Bytes per second below which any network between nodes is slow: less than a gigabit."""
FASTER = 10
"""An interface that is this many times as fast as what was measured isn't the one that was used."""
VIRTUAL = ("docker", "virbr", "veth", "br-", "usb", "cni", "tun", "tap")
"""Beginnings of the names of interfaces that don't lead to other nodes."""
MOST_PAIRS = 8
"""Pairs that are named one by one."""


def network_findings(answers: RankAnswers) -> Iterator[Finding]:
    """Find links that are slow or lose packets, and the nodes to which they belong."""
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
    if not slow and not lossy and (faster := _faster_interface(answers, median)):
        nodes = tuple(dict.fromkeys(node for pair in pairs for node in pair.nodes))
        yield Finding(
            check="network",
            severity=Severity.WARNING,
            problem=f"the network between the nodes carries {scaled(median, 'B')}/s, but {faster}",
            why="ranks exchange the gradients of each step over it",
            remedy=f"set cluster.network_interface={faster.partition(' ')[0]}",
            nodes=nodes,
        )
    elif median < SLOW_NETWORK and not slow and not lossy:
        nodes = tuple(dict.fromkeys(node for pair in pairs for node in pair.nodes))
        yield Finding(
            check="network",
            severity=Severity.WARNING,
            problem=f"the network between the nodes carries {scaled(median, 'B')}/s",
            why="ranks exchange the gradients of each step over it",
            remedy="set cluster.network_interface to a faster one, if the nodes have one",
            nodes=nodes,
        )


def usable_interfaces(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The interfaces of a rank's node that have an address and may lead to other nodes, the fastest first."""
    found = (one for one in record.get("interfaces", ()) if one["address"] and not one["name"].startswith(VIRTUAL))
    return sorted(found, key=lambda one: -one["mbit_per_s"])


def _faster_interface(answers: RankAnswers, bytes_per_s: float) -> str:
    """Describe an interface that is much faster than what was measured; empty if none is, or one was chosen."""
    if answers.interface is not None:
        return ""
    interfaces = [one for record in answers.records.values() for one in usable_interfaces(record)[:1]]
    fastest = max(interfaces, key=lambda one: one["mbit_per_s"], default=None)
    if fastest is None or fastest["mbit_per_s"] * 1e6 / 8 < FASTER * bytes_per_s:
        return ""
    return f"{fastest['name']} has {fastest['mbit_per_s'] / 1000:g} Gbit/s"


def _blamed(
    what: str,
    bad: Sequence[Pair],
    pairs: Sequence[Pair],
    describe: Callable[[Sequence[Pair], Sequence[Pair]], str],
    why: str,
) -> Iterator[Finding]:
    """Findings on the nodes that explain bad pairs, and on the pairs that no node explains."""
    nodes = nodes_at_fault(bad, pairs)
    everyone = {node for pair in pairs for node in pair.nodes}
    if len(pairs) > 1 and everyone == set(nodes):
        yield Finding(
            check="network",
            severity=Severity.WARNING,
            problem=f"the network between all nodes {what}: {describe(bad, pairs)}",
            why=why,
            remedy="set cluster.network_interface to another one, if the nodes have one",
            nodes=tuple(nodes),
        )
        return
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
    for pair in bad[:MOST_PAIRS]:
        if not set(pair.nodes) & set(nodes):
            yield Finding(
                check="network",
                severity=Severity.WARNING,
                problem=f"{pair.first} and {pair.second}: the network between them {what}: {describe([pair], pairs)}",
                why=why,
                remedy="examine again with more nodes, to find out whose link it is",
                nodes=pair.nodes,
            )


def _losses(bad: Sequence[Pair], pairs: Sequence[Pair]) -> str:  # noqa: ARG001 - as `_speeds`
    sent = sum(pair.first_sent + pair.second_sent for pair in bad)
    repeated = sum(pair.repeated for pair in bad)
    return f"{repeated} of {sent} TCP segments were sent again"


def _speeds(bad: Sequence[Pair], pairs: Sequence[Pair]) -> str:
    worst = min(bad, key=lambda pair: pair.bytes_per_s)
    text = f"{scaled(worst.bytes_per_s, 'B')}/s, {brief_time(worst.best_latency_s)}"
    others = [pair for pair in pairs if pair not in bad]
    if not others:
        return text
    usual = statistics.median(pair.bytes_per_s for pair in others)
    latency = statistics.median(pair.best_latency_s for pair in others)
    return f"{text} (between the others {scaled(usual, 'B')}/s, {brief_time(latency)})"

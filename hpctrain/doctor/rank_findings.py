"""What the records of the ranks, and their measurements, mean."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from hpctrain.doctor.finding import Finding, Severity
from hpctrain.doctor.gpu_findings import gpu_findings
from hpctrain.doctor.network_findings import network_findings, usable_interfaces
from hpctrain.doctor.pairs import SLOW
from hpctrain.doctor.rank_answers import RankAnswers
from hpctrain.phrases import listed, numbered, scaled

MOST_ERRORS = 4
"""Different errors that are named."""
SLOW_DEVICE = 2.0
"""A device is slow if others are this many times faster."""


def rank_findings(answers: RankAnswers) -> list[Finding]:
    """Find out what is wrong with the ranks, the devices and the network."""
    if not answers.job.rank_nodes:
        return []
    return [
        *_unstarted(answers),
        *_names_of_nodes(answers),
        *_failed(answers),
        *_unfinished(answers),
        *gpu_findings(answers),
        *network_findings(answers),
        *_slow_devices(answers),
        *_slow_disks(answers),
    ]


def _unstarted(answers: RankAnswers) -> Iterator[Finding]:
    missing = [rank for rank in range(answers.world_size) if rank not in answers.records]
    if not missing:
        return
    nodes = answers.incomplete_nodes
    said = "; ".join([*[*answers.last_lines.values()][:1], *answers.job.complaints.get("ranks", [])[:4]])
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
    met = any(record.get("met") for record in answers.records.values())
    if answers.interface is not None or len(answers.job.rank_nodes) < 2 or met:
        return
    leaders = {str(record["node"]): record for record in answers.records.values()}
    bad = tuple(node for node, record in leaders.items() if str(record.get("own_address", "")).startswith("127."))
    if bad:
        known = next((one["name"] for one in usable_interfaces(leaders[bad[0]])), "NAME")
        yield Finding(
            check="interface",
            severity=Severity.ERROR,
            problem=f"{listed(bad)}: the node's own name resolves to {leaders[bad[0]]['own_address']}, "
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
    for error, ranks in list(by_error.items())[:MOST_ERRORS]:
        nodes = tuple(dict.fromkeys(map(answers.node_of, ranks)))
        stage = answers.records[ranks[0]]["stage"]
        yield Finding(
            check="ranks",
            severity=Severity.ERROR,
            problem=f"{numbered('rank', ranks)} on {listed(nodes)} failed while {stage}: {error}",
            why="a run would fail in the same way",
            remedy="see logs/ in the folder of this examination",
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
        problem=f"{numbered('rank', stuck)} on {listed(nodes)} stopped without an error while {stage}"
        f"{': ' if said else ''}{said}",
        why="a run would hang, or fail, in the same way",
        remedy="see logs/ in the folder of this examination",
        nodes=nodes,
    )


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

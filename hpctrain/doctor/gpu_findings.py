"""What the devices that the ranks found, and nvidia-smi's reports, mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpctrain.doctor.finding import Finding, Severity
from hpctrain.doctor.rank_answers import RankAnswers
from hpctrain.phrases import listed

HOT = 90
"""Degrees Celsius near which GPUs lower their clocks."""


def gpu_findings(answers: RankAnswers) -> Iterator[Finding]:
    """Find GPUs that are missing, broken, slowed, or unlike the others."""
    yield from _devices(answers)
    yield from _gpus(answers)


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
                severity=Severity.WARNING,
                problem=f"{node}: nvidia-smi fails: {record['smi_problem']}",
                why="the GPUs' health isn't known, even if torch uses them",
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
            severity=Severity.WARNING,
            problem=f"{name}: {gpu['ecc_errors']} uncorrected memory errors since the driver was loaded",
            why="such an error ends the process that uses the GPU; more of them mean that it is breaking",
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

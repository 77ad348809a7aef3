"""SLURM's settings, as they are seen from the machine where the command is typed."""

from __future__ import annotations

import getpass
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.config.cluster import Slurm as SlurmCluster
from hpctrain.config.node_counts import node_counts
from hpctrain.config.resources import resources_of
from hpctrain.config.root import Config
from hpctrain.doctor.finding import Finding, Severity
from hpctrain.doctor.slurm_checks import Request, facts, partitions_of, slurm_findings
from hpctrain.errors import SchedulerError
from hpctrain.scheduler.settings import Association, Partition
from hpctrain.scheduler.slurm import Slurm

SAVES_OFTEN_MIN = 15
"""Minutes between saves that are often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """What is known of the cluster.

    Attributes:
        text: one line for the reader; empty if there is nothing to say.
        facts: settings by name.
        partition: in which the run's job would start; None if it isn't known.
        findings: settings that matter.
    """

    text: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    partition: Partition | None = None
    findings: Sequence[Finding] = ()


def view_cluster(config: Config, slurm: Slurm) -> ClusterView:
    """Read SLURM's settings, and find out what they mean for a run.

    Args:
        config: of the run; with another cluster than SLURM, a cluster that doesn't answer is no finding.
        slurm: is asked.
    """
    cluster = config.cluster if isinstance(config.cluster, SlurmCluster) else None
    try:
        settings, known = slurm.settings(), slurm.partitions()
    except SchedulerError as error:
        if cluster is not None:
            return ClusterView(findings=[_no_slurm(error)])
        # a machine without SLURM's commands is no cluster's
        return ClusterView(findings=[_silent(error)] if shutil.which("scontrol") else [])
    asked = cluster or SlurmCluster()
    partition = next(iter(partitions_of(asked, known)), None)
    checkpoint, counts = config.checkpoint, node_counts(config, resources_of(config))
    request = Request(
        cluster=asked,
        is_typed=cluster is not None,
        nodes=counts[-1] if len(counts) > 1 else counts[0] + asked.spare_nodes,
        saves_often=checkpoint.auto or bool(checkpoint.every_steps) or (checkpoint.every_min or 1e9) <= SAVES_OFTEN_MIN,
        accounts=_accounts(slurm, settings.cluster),
    )
    return ClusterView(
        text=f"SLURM {settings.version} of the cluster {settings.cluster}{_described(partition)}",
        facts=facts(settings, partition),
        partition=partition,
        findings=slurm_findings(settings, known, request),
    )


def _accounts(slurm: Slurm, cluster: str) -> list[Association]:
    try:
        return slurm.associations(getpass.getuser(), cluster)
    except (SchedulerError, OSError, KeyError):  # many clusters have no accounting, and a user may have no name
        return []


def _described(partition: Partition | None) -> str:
    if partition is None:
        return ""
    limit = partition.max_time_min
    text = f"; partition {partition.name}: {partition.values.get('TotalNodes', '?')} nodes, "
    text += "no time limit" if limit is None else f"at most {limit} min"
    if partition.preempt_mode.startswith("OFF"):
        return text
    return f"{text}, preemption {partition.preempt_mode} with {partition.grace_time_s} s of grace time"


def _silent(error: Exception) -> Finding:
    return Finding(
        check="slurm",
        severity=Severity.WARNING,
        problem=f"SLURM's commands are here, but it doesn't answer: {error}",
        why="jobs can't be submitted now",
        remedy="try `sinfo`; with another shell or module, SLURM_CONF may be missing",
    )


def _no_slurm(error: Exception) -> Finding:
    return Finding(
        check="slurm",
        severity=Severity.ERROR,
        problem=f"SLURM can't be asked: {error}",
        why="jobs can't be submitted from here",
        remedy="type this on a login node of the cluster, where `sinfo` works",
    )

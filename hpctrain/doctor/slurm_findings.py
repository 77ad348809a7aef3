"""Findings on SLURM's settings, seen from the machine where the command is typed.

There is a function for each subject: as a table, conditions and texts were harder to read.
"""

from __future__ import annotations

import getpass
import itertools
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hpctrain.config.cluster import Slurm as SlurmCluster
from hpctrain.config.resources import node_counts, resources_of
from hpctrain.config.root import Config
from hpctrain.doctor.finding import Finding, Severity
from hpctrain.errors import SchedulerError
from hpctrain.phrases import all_of, either, listed
from hpctrain.scheduler.gres import SiteGpus
from hpctrain.scheduler.settings import Association, Partition, Settings
from hpctrain.scheduler.slurm import Slurm
from hpctrain.supervise.ranks import EXITING_S

OLDEST = (20, 11)
"""The oldest version of SLURM whose answers hpctrain reads."""
GPU_TYPE = "gpu type"
"""The check on a request of GPUs without a type."""
SAVES_OFTEN_MIN = 15
"""Minutes between saves that are often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmView:
    """SLURM's settings, and what a run asks for.

    Attributes:
        settings: of the cluster.
        partitions: of the cluster.
        cluster: the keys of cluster=slurm.
        nodes: number of nodes, with the spare ones; the least if it may be one of several.
        is_typed: whether the user asked for SLURM; otherwise partition and account aren't chosen yet.
        saves_often: whether checkpoints are written at least every quarter of an hour, as far as that is known.
        accounts: of the user; empty if they aren't known.
        gpus: of all nodes.
    """

    settings: Settings
    partitions: Sequence[Partition]
    cluster: SlurmCluster
    nodes: int
    is_typed: bool = True
    saves_often: bool = True
    accounts: Sequence[Association] = ()
    gpus: SiteGpus = field(default_factory=SiteGpus)

    @property
    def chosen(self) -> list[Partition]:
        """The partitions of the request, of which SLURM chooses one; the default one if none is named."""
        if self.cluster.partition is None:
            return [partition for partition in self.partitions if partition.is_default]
        names = self.cluster.partition.split(",")
        return [partition for partition in self.partitions if partition.name in names]

    @property
    def partition(self) -> Partition | None:
        """The partition in which the run's job would start; None if it isn't known."""
        return next(iter(self.chosen), None)

    @property
    def partition_gpus(self) -> SiteGpus:
        """The GPUs of the partitions of the request; of all if they aren't known."""
        names = [partition.name for partition in self.chosen]
        return self.gpus.of_partitions(",".join(names) or None)

    @property
    def partition_names(self) -> str:
        """The names of the first few partitions."""
        return listed(partition.name for partition in self.partitions)

    @property
    def facts(self) -> dict[str, str]:
        """The settings that decide what becomes of a run, by name."""
        settings, partition = self.settings, self.partition
        names = ("JobRequeue", "PreemptType", "PreemptMode", "KillWait", "MaxArraySize", "MpiDefault", "ProctrackType")
        facts = {"SLURM": settings.version, "cluster": settings.cluster}
        facts |= {name: settings.text(name) or "none" for name in (*names, "TaskPlugin", "AccountingStorageType")}
        if partition is not None:
            facts |= {"partition": partition.name}
            limits = ("MaxTime", "MaxNodes", "GraceTime", "TotalNodes")
            facts |= {name: partition.values.get(name, "") for name in limits}
            facts["PreemptMode of the partition"] = partition.preempt_mode
        return facts

    @property
    def text(self) -> str:
        """One line for the reader."""
        text = f"SLURM {self.settings.version} of the cluster {self.settings.cluster}"
        partition = self.partition
        if partition is None:
            return text
        limit = partition.max_time_min
        text += f"; partition {partition.name}: {partition.values.get('TotalNodes', '?')} nodes, "
        text += "no time limit" if limit is None else f"at most {limit} min"
        if not partition.preempt_mode.startswith("OFF"):
            text += f", preemption {partition.preempt_mode} with {partition.grace_time_s} s of grace time"
        return text + self._gpu_text

    @property
    def _gpu_text(self) -> str:
        gpus = self.partition_gpus
        if not gpus.nodes:
            return ""
        numbers = " or ".join(map(str, gpus.counts))
        text = f"; GPUs: {', '.join(gpus.descriptions) or f'{numbers} per node'}"
        if self.cluster.node_gpus is not None:
            return text
        return f"{text}; to request them: cluster.gpus_per_node={gpus.counts[-1]}"


def slurm_findings(view: SlurmView) -> Iterator[Finding]:
    """Yield the findings on SLURM's settings."""
    version = tuple(int(part) for part in view.settings.version.split(".")[:2] if part.isdecimal())
    if len(version) == 2 and version < OLDEST:
        yield Finding(
            check="slurm version",
            problem=f"SLURM is {view.settings.version}; expected {OLDEST[0]}.{OLDEST[1]} or later",
            why="hpctrain reads the answers of squeue and scontrol, which older versions write differently",
            remedy="ask the cluster's administrators; or start the ranks by hand with srun",
        )
    yield from _requeues(view)
    yield from _absent_partitions(view)
    yield from _misfits(view)
    yield from _short_accounts(view)
    yield from _preemptions(view)
    yield from _gpu_types(view)
    seconds = view.settings.number("KillWait")
    if seconds is not None and seconds < EXITING_S:
        yield Finding(
            check="kill wait",
            severity=Severity.NOTE,
            problem=f"KillWait={seconds} s: SLURM kills the ranks that soon after a cancel or the time limit",
            why="a save that has begun may not be finished",
            remedy="raise cluster.signal_delay_s, so that the save before a time limit begins earlier",
        )


def _requeues(view: SlurmView) -> Iterator[Finding]:
    options = {name.replace("_", "-"): value for name, value in view.cluster.sbatch.items()}
    if options.get("requeue") is False or options.get("no-requeue"):
        yield Finding(
            check="requeue",
            severity=Severity.WARNING,
            problem="cluster.sbatch asks SLURM not to requeue the job",
            why="a run whose node dies, or that is preempted without grace time, ends there",
            remedy="leave out cluster.sbatch.requeue and cluster.sbatch.no-requeue",
        )


def _absent_partitions(view: SlurmView) -> Iterator[Finding]:
    names, request = {partition.name for partition in view.partitions}, view.cluster.partition
    problems = [f"there is no partition {name}" for name in (request or "").split(",") if name and name not in names]
    # where a plugin of the site chooses the partition, none has to be named
    by_site = view.settings.text("JobSubmitPlugins")
    has_default = any(partition.is_default for partition in view.partitions)
    if view.is_typed and not (request or by_site or has_default):
        problems.append("there is no default partition")
    for problem in problems:
        remedy = f"set cluster.partition to one of {view.partition_names}"
        yield Finding(check="partition", problem=problem, why="sbatch refuses the job", remedy=remedy)


def _misfits(view: SlurmView) -> Iterator[Finding]:
    """Yield the findings on partitions that don't fit the request, unless one of them fits."""
    misfits = [list(_misfits_of(view, partition)) for partition in view.chosen if view.is_typed]
    if all(misfits):
        yield from itertools.chain(*misfits)


def _misfits_of(view: SlurmView, partition: Partition) -> Iterator[Finding]:
    # a quality of service may allow more (sacctmgr(1), PartitionTimeLimit)
    by_qos = view.cluster.qos or partition.values.get("QoS", "N/A") != "N/A"
    severity = Severity.WARNING if by_qos else Severity.ERROR
    refused = "the job stays in the queue, or sbatch refuses it"
    if partition.state != "UP":
        yield Finding(
            check="partition",
            problem=f"partition {partition.name} is {partition.state}",
            why="jobs don't start there",
            remedy=f"set cluster.partition to one of {view.partition_names}",
        )
    if partition.max_time_min is not None and view.cluster.time_limit_min > partition.max_time_min:
        yield Finding(
            check="partition",
            severity=severity,
            problem=f"partition {partition.name} allows {partition.max_time_min} min, "
            f"but cluster.time_limit_min={view.cluster.time_limit_min}",
            why=refused,
            remedy=f"set cluster.time_limit_min={partition.max_time_min}: a run continues in as many jobs as it needs",
        )
    if partition.max_nodes is not None and view.nodes > partition.max_nodes:
        yield Finding(
            check="partition",
            severity=severity,
            problem=f"partition {partition.name} gives a job at most {partition.max_nodes} nodes, "
            f"but the run asks for {view.nodes}",
            why=refused,
            remedy="lower nodes, or set cluster.partition",
        )


def _short_accounts(view: SlurmView) -> Iterator[Finding]:
    account = view.cluster.account
    # the database has lower case (sacctmgr(1))
    limits = [row.max_wall_min for row in view.accounts if account is None or account.lower() == row.account]
    longest = max((limit for limit in limits if limit is not None), default=None)
    if not view.is_typed or "limits" not in view.settings.text("AccountingStorageEnforce"):
        return
    if longest is not None and None not in limits and longest < view.cluster.time_limit_min:
        yield Finding(
            check="account",
            severity=Severity.WARNING,  # a quality of service comes before it
            problem=f"your account allows {longest} min, but cluster.time_limit_min={view.cluster.time_limit_min}",
            why="the job stays in the queue, or sbatch refuses it",
            remedy=f"set cluster.time_limit_min={longest}: a run continues in as many jobs as it needs",
        )


def _gpu_types(view: SlurmView) -> Iterator[Finding]:
    gpus = view.partition_gpus
    if not view.cluster.node_gpus or view.cluster.gpus.types or not gpus.types:
        return
    several = len(gpus.types) > 1
    request = view.cluster.gpus
    values = list(map(request.type_value, gpus.types))
    yield Finding(
        check=GPU_TYPE,
        severity=Severity.NOTE,
        problem=f"the GPUs are {all_of(gpus.descriptions)}, and the run names no type",
        why="a job may get nodes of different types, and wait for the slower ones"
        if several
        else "a site may demand the type",
        remedy=f"set {request.type_key}={values[0]}" + (f", or {either(values[1:])}" if several else ""),
    )


def _preemptions(view: SlurmView) -> Iterator[Finding]:
    for partition in view.chosen:
        if "SUSPEND" in partition.preempt_mode and not partition.preempt_mode.startswith("OFF"):
            yield Finding(
                check="preemption",
                severity=Severity.WARNING,
                problem=f"partition {partition.name} suspends preempted jobs",
                why="a suspended rank can't answer, and those on other nodes may take that for a hang",
                remedy="raise health.hang_timeout_s above the time for which jobs are suspended",
            )
        elif not (partition.preempt_mode.startswith("OFF") or partition.grace_time_s or view.saves_often):
            yield Finding(
                check="preemption",
                severity=Severity.WARNING,
                problem=f"partition {partition.name} kills preempted jobs without a grace time",
                why="the steps since the last checkpoint are computed again",
                remedy="set checkpoint.every_min=10",
            )


def unreachable_slurm_findings(error: SchedulerError, *, is_typed: bool) -> Iterator[Finding]:
    """Yield the findings if SLURM can't be asked.

    Args:
        error: of its commands.
        is_typed: whether the user asked for SLURM. If not, a machine without its commands isn't in a cluster.
    """
    if is_typed:
        yield Finding(
            check="slurm",
            problem=f"SLURM can't be asked: {error}",
            why="jobs can't be submitted from here",
            remedy="type this on a login node of the cluster, where `sinfo` works",
        )
    elif shutil.which("scontrol"):
        yield Finding(
            check="slurm",
            severity=Severity.WARNING,
            problem=f"SLURM's commands are here, but it doesn't answer: {error}",
            why="jobs can't be submitted now",
            remedy="try `sinfo`; with another shell or module, SLURM_CONF may be missing",
        )


def view_slurm(config: Config, slurm: Slurm) -> tuple[SlurmView | None, list[Finding]]:
    """Read SLURM's settings, and find out what they mean for a run; None if SLURM doesn't answer.

    Args:
        config: of the run; with another cluster than SLURM, a cluster that doesn't answer isn't a finding.
        slurm: is asked.
    """
    is_typed = isinstance(config.cluster, SlurmCluster)
    try:
        settings, partitions = slurm.settings(), slurm.partitions()
    except SchedulerError as error:
        return None, list(unreachable_slurm_findings(error, is_typed=is_typed))
    cluster = config.cluster if isinstance(config.cluster, SlurmCluster) else SlurmCluster()
    checkpoint, counts = config.checkpoint, node_counts(config, resources_of(config))
    view = SlurmView(
        settings=settings,
        partitions=partitions,
        cluster=cluster,
        nodes=counts[-1] if len(counts) > 1 else counts[0] + cluster.spare_nodes,
        is_typed=is_typed,
        saves_often=checkpoint.auto or bool(checkpoint.every_steps) or (checkpoint.every_min or 1e9) <= SAVES_OFTEN_MIN,
        accounts=_accounts(slurm, settings.cluster),
        gpus=_gpus(slurm),
    )
    return view, list(slurm_findings(view))


def _gpus(slurm: Slurm) -> SiteGpus:
    try:
        return slurm.gpus()
    except SchedulerError:
        return SiteGpus()


def _accounts(slurm: Slurm, cluster: str) -> list[Association]:
    try:
        return slurm.associations(getpass.getuser(), cluster)
    except (SchedulerError, OSError, KeyError):  # many clusters have no accounting, and a user may have no name
        return []

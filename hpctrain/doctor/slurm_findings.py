"""What SLURM's settings mean for a run, seen from the machine where the command is typed."""

from __future__ import annotations

import getpass
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpctrain.config.cluster import Slurm as SlurmCluster
from hpctrain.config.resources import node_counts, resources_of
from hpctrain.config.root import Config
from hpctrain.doctor.finding import Case, Check, Finding, Severity, evaluate, when
from hpctrain.errors import SchedulerError
from hpctrain.phrases import listed
from hpctrain.scheduler.settings import Association, Partition, Settings
from hpctrain.scheduler.slurm import Slurm
from hpctrain.supervise.ranks import EXITING_S

OLDEST = (20, 11)
"""The oldest version of SLURM whose answers hpctrain reads."""
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
    """

    settings: Settings
    partitions: Sequence[Partition]
    cluster: SlurmCluster
    nodes: int
    is_typed: bool = True
    saves_often: bool = True
    accounts: Sequence[Association] = ()

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
        if partition.preempt_mode.startswith("OFF"):
            return text
        return f"{text}, preemption {partition.preempt_mode} with {partition.grace_time_s} s of grace time"


def _old_version(view: SlurmView) -> list[Case]:
    parts = view.settings.version.split(".")
    numbers = tuple(int(part) for part in parts[:2] if part.isdecimal())
    return when(len(numbers) == 2 and numbers < OLDEST)


def _forbids_requeue(view: SlurmView) -> bool:
    options = {name.replace("_", "-"): value for name, value in view.cluster.sbatch.items()}
    return options.get("requeue") is False or bool(options.get("no-requeue"))


def _no_such_partition(view: SlurmView) -> Iterator[Case]:
    names, typed = {partition.name for partition in view.partitions}, view.cluster.partition
    for name in typed.split(",") if typed else ():
        yield from when(name not in names, problem=f"there is no partition {name}")
    # where a plugin of the site chooses the partition, none has to be named
    by_site = view.settings.text("JobSubmitPlugins")
    has_default = any(partition.is_default for partition in view.partitions)
    no_default = view.is_typed and not typed and not by_site and not has_default
    yield from when(no_default, problem="there is no default partition")


def _misfits(view: SlurmView, *, kind: str) -> Iterator[Case]:
    """Why a partition doesn't fit the request: it is `down`, too short in `time`, or too small for its `nodes`.

    One of several partitions that fits is enough.
    """
    misfits = [dict(_misfits_of(view, partition)) for partition in view.chosen if view.is_typed]
    for misfit in misfits if all(misfits) else ():
        yield from when(kind in misfit, **misfit.get(kind, {}))


def _misfits_of(view: SlurmView, partition: Partition) -> Iterator[tuple[str, Case]]:
    # a quality of service may allow more (sacctmgr(1), PartitionTimeLimit)
    by_qos = view.cluster.qos or partition.values.get("QoS", "N/A") != "N/A"
    case = {"partition": partition, "severity": Severity.WARNING if by_qos else Severity.ERROR}
    if partition.state != "UP":
        yield "down", {"partition": partition}
    if partition.max_time_min is not None and view.cluster.time_limit_min > partition.max_time_min:
        yield "time", case
    if partition.max_nodes is not None and view.nodes > partition.max_nodes:
        yield "nodes", case


def _preempting(view: SlurmView, *, suspends: bool) -> list[Case]:
    """The partitions of the request that suspend preempted jobs, or those that kill them at once."""
    return [
        {"partition": partition}
        for partition in view.chosen
        if not partition.preempt_mode.startswith("OFF")
        and ("SUSPEND" in partition.preempt_mode) is suspends
        and (suspends or not (partition.grace_time_s or view.saves_often))
    ]


def _own_accounts(view: SlurmView) -> list[Association] | None:
    """The user's accounts that the request may mean; None where SLURM doesn't enforce them or they aren't known."""
    if "associations" not in view.settings.text("AccountingStorageEnforce") or not view.accounts or not view.is_typed:
        return None
    account = view.cluster.account
    # the database has lower case (sacctmgr(1))
    return [one for one in view.accounts if account is None or account.lower() == one.account]


def _no_account(view: SlurmView) -> list[Case]:
    return when(_own_accounts(view) == [], accounts=listed(dict.fromkeys(one.account for one in view.accounts)))


def _account_time(view: SlurmView) -> list[Case]:
    limits = [account.max_wall_min for account in _own_accounts(view) or ()]
    longest = max((limit for limit in limits if limit is not None), default=None)
    if longest is None or None in limits or "limits" not in view.settings.text("AccountingStorageEnforce"):
        return []
    return when(longest < view.cluster.time_limit_min, limit=longest)


def _kill_wait(view: SlurmView) -> list[Case]:
    seconds = view.settings.number("KillWait")
    return when(seconds is not None and seconds < EXITING_S, seconds=seconds)


def _tracking(view: SlurmView) -> list[Case]:
    kind = view.settings.text("ProctrackType").rpartition("/")[2]
    return when(kind in {"linuxproc", "pgid"}, kind=kind)


SLURM_CHECKS: tuple[Check[SlurmView], ...] = (
    Check(
        "slurm version",
        Severity.ERROR,
        _old_version,
        problem=f"SLURM is {{measured.settings.version}}; expected {OLDEST[0]}.{OLDEST[1]} or later",
        why="hpctrain reads the answers of squeue and scontrol, which older versions write differently",
        remedy="ask the cluster's administrators; or start the ranks by hand with srun",
    ),
    Check(
        "requeue",
        Severity.WARNING,
        lambda view: when(_forbids_requeue(view)),
        problem="cluster.sbatch asks SLURM not to requeue the job",
        why="a run whose node dies, or that is preempted without grace time, ends there",
        remedy="leave out cluster.sbatch.requeue and cluster.sbatch.no-requeue",
    ),
    Check(
        "requeue",
        Severity.NOTE,
        lambda view: when(not _forbids_requeue(view) and view.settings.text("JobRequeue") == "0"),
        problem="JobRequeue=0: SLURM requeues only jobs that ask for it",
        why="hpctrain's jobs ask for it; a batch script of your own without --requeue isn't continued",
        remedy="put `#SBATCH --requeue` into scripts of your own, as slurm/train.sbatch does",
    ),
    Check(
        "partition",
        Severity.ERROR,
        _no_such_partition,
        problem="{problem}",
        why="sbatch refuses the job",
        remedy="set cluster.partition to one of {measured.partition_names}",
    ),
    Check(
        "partition",
        Severity.ERROR,
        lambda view: _misfits(view, kind="down"),
        problem="partition {partition.name} is {partition.state}",
        why="jobs don't start there",
        remedy="set cluster.partition to one of {measured.partition_names}",
    ),
    Check(
        "partition",
        Severity.ERROR,
        lambda view: _misfits(view, kind="time"),
        problem="partition {partition.name} allows {partition.max_time_min} min, "
        "but cluster.time_limit_min={measured.cluster.time_limit_min}",
        why="the job stays in the queue, or sbatch refuses it",
        remedy="set cluster.time_limit_min={partition.max_time_min}: a run continues in as many jobs as it needs",
    ),
    Check(
        "partition",
        Severity.ERROR,
        lambda view: _misfits(view, kind="nodes"),
        problem="partition {partition.name} gives a job at most {partition.max_nodes} nodes, "
        "but the run asks for {measured.nodes}",
        why="the job stays in the queue, or sbatch refuses it",
        remedy="lower nodes, or set cluster.partition",
    ),
    Check(
        "preemption",
        Severity.WARNING,
        lambda view: _preempting(view, suspends=True),
        problem="partition {partition.name} suspends preempted jobs",
        why="a suspended rank can't answer, and those on other nodes may take that for a hang",
        remedy="raise health.hang_timeout_s above the time for which jobs are suspended",
    ),
    Check(
        "preemption",
        Severity.WARNING,
        lambda view: _preempting(view, suspends=False),
        problem="partition {partition.name} kills preempted jobs without a grace time",
        why="the steps since the last checkpoint are computed again",
        remedy="set checkpoint.every_min=10",
    ),
    Check(
        "account",
        Severity.ERROR,
        _no_account,
        problem="you have no account {measured.cluster.account}",
        why="sbatch refuses the job",
        remedy="set cluster.account to one of {accounts}",
    ),
    Check(
        "account",
        Severity.WARNING,  # a quality of service comes before it
        _account_time,
        problem="your account allows {limit} min, but cluster.time_limit_min={measured.cluster.time_limit_min}",
        why="the job stays in the queue, or sbatch refuses it",
        remedy="set cluster.time_limit_min={limit}: a run continues in as many jobs as it needs",
    ),
    Check(
        "kill wait",
        Severity.NOTE,
        _kill_wait,
        problem="KillWait={seconds} s: SLURM kills the ranks that soon after a cancel or the time limit",
        why="a save that has begun may not be finished",
        remedy="raise cluster.signal_delay_s, so that the save before a time limit begins earlier",
    ),
    Check(
        "process tracking",
        Severity.NOTE,
        _tracking,
        problem="SLURM tracks processes by their parents (ProctrackType=proctrack/{kind})",
        why="a process that detaches itself may outlive its job, and keep memory or a GPU",
        remedy="nothing has to be done; ask for proctrack/cgroup if dead runs keep GPUs busy",
    ),
)
"""What SLURM's settings mean for a run."""


@dataclass(frozen=True, slots=True)
class SilentSlurm:
    """SLURM that can't be asked.

    Attributes:
        error: of its commands.
        is_typed: whether the user asked for SLURM.
    """

    error: SchedulerError
    is_typed: bool


SILENCE_CHECKS: tuple[Check[SilentSlurm], ...] = (
    Check(
        "slurm",
        Severity.ERROR,
        lambda slurm: when(slurm.is_typed),
        problem="SLURM can't be asked: {measured.error}",
        why="jobs can't be submitted from here",
        remedy="type this on a login node of the cluster, where `sinfo` works",
    ),
    Check(
        "slurm",
        Severity.WARNING,
        # a machine without SLURM's commands isn't in a cluster
        lambda slurm: when(not slurm.is_typed and shutil.which("scontrol")),
        problem="SLURM's commands are here, but it doesn't answer: {measured.error}",
        why="jobs can't be submitted now",
        remedy="try `sinfo`; with another shell or module, SLURM_CONF may be missing",
    ),
)
"""What it means that SLURM doesn't answer."""


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
        return None, evaluate(SILENCE_CHECKS, SilentSlurm(error, is_typed))
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
    )
    return view, evaluate(SLURM_CHECKS, view)


def _accounts(slurm: Slurm, cluster: str) -> list[Association]:
    try:
        return slurm.associations(getpass.getuser(), cluster)
    except (SchedulerError, OSError, KeyError):  # many clusters have no accounting, and a user may have no name
        return []

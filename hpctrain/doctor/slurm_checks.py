"""What SLURM's settings mean for a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpctrain.config.cluster import Slurm
from hpctrain.doctor.finding import Finding, Severity
from hpctrain.phrases import listed
from hpctrain.scheduler.settings import Association, Partition, Settings
from hpctrain.supervise.ranks import EXITING_S

OLDEST = (20, 11)
"""The oldest version of SLURM whose answers hpctrain reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a run asks SLURM for.

    Attributes:
        cluster: the keys of cluster=slurm.
        nodes: number of nodes, with the spare ones; the least if it may be one of several.
        is_typed: whether the user asked for SLURM; otherwise partition and account aren't chosen yet.
        saves_often: whether checkpoints are written at least every quarter of an hour, as far as that is known.
        accounts: of the user; empty if they aren't known.
    """

    cluster: Slurm
    nodes: int
    is_typed: bool = True
    saves_often: bool = True
    accounts: Sequence[Association] = ()


def facts(settings: Settings, partition: Partition | None) -> dict[str, str]:
    """The settings that decide what becomes of a run, by name."""
    names = ("JobRequeue", "PreemptType", "PreemptMode", "KillWait", "MaxArraySize", "MpiDefault", "ProctrackType")
    found = {"SLURM": settings.version, "cluster": settings.cluster}
    found |= {name: settings.text(name) or "none" for name in (*names, "TaskPlugin", "AccountingStorageType")}
    if partition is not None:
        found |= {"partition": partition.name}
        found |= {name: partition.values.get(name, "") for name in ("MaxTime", "MaxNodes", "GraceTime", "TotalNodes")}
        found["PreemptMode of the partition"] = partition.preempt_mode
    return found


def partitions_of(cluster: Slurm, known: Sequence[Partition]) -> list[Partition]:
    """The partitions of a request, of which SLURM chooses one; the default one if none is named."""
    if cluster.partition is None:
        return [one for one in known if one.is_default]
    return [one for one in known if one.name in cluster.partition.split(",")]


def slurm_findings(settings: Settings, known: Sequence[Partition], request: Request) -> list[Finding]:
    """Find out which settings would fail a run, or cost it something.

    Args:
        settings: of the cluster.
        known: its partitions.
        request: the run's.
    """
    chosen = partitions_of(request.cluster, known)
    unfit = [list(_partition(one, known, request)) for one in chosen if request.is_typed]
    return [
        *_version(settings),
        *_requeue(settings, request.cluster),
        *_unknown_partitions(settings, known, request),
        # one that fits is enough
        *(found for one in unfit for found in one if all(unfit)),
        *(found for one in chosen for found in _preemption(one, request)),
        *_account(settings, request),
        *_kill_wait(settings),
        *_tracking(settings),
    ]


def _version(settings: Settings) -> Iterator[Finding]:
    parts = settings.version.split(".")
    numbers = tuple(int(part) for part in parts[:2] if part.isdecimal())
    if len(numbers) == 2 and numbers < OLDEST:
        yield Finding(
            check="slurm version",
            severity=Severity.ERROR,
            problem=f"SLURM is {settings.version}; expected {OLDEST[0]}.{OLDEST[1]} or later",
            why="hpctrain reads the answers of squeue and scontrol, which older versions write differently",
            remedy="ask the cluster's administrators; or start the ranks by hand with srun",
        )


def _requeue(settings: Settings, cluster: Slurm) -> Iterator[Finding]:
    options = {name.replace("_", "-"): value for name, value in cluster.sbatch.items()}
    if options.get("requeue") is False or options.get("no-requeue"):
        yield Finding(
            check="requeue",
            severity=Severity.WARNING,
            problem="cluster.sbatch asks SLURM not to requeue the job",
            why="a run whose node dies, or that is preempted without grace time, ends there",
            remedy="leave out cluster.sbatch.requeue and cluster.sbatch.no-requeue",
        )
    elif settings.text("JobRequeue") == "0":
        yield Finding(
            check="requeue",
            severity=Severity.NOTE,
            problem="JobRequeue=0: SLURM requeues only jobs that ask for it",
            why="hpctrain's jobs ask for it; a batch script of your own without --requeue isn't continued",
            remedy="put `#SBATCH --requeue` into scripts of your own, as slurm/train.sbatch does",
        )


def _unknown_partitions(settings: Settings, known: Sequence[Partition], request: Request) -> Iterator[Finding]:
    names = listed([one.name for one in known])
    typed = request.cluster.partition
    for name in typed.split(",") if typed else ():
        if name not in {one.name for one in known}:
            yield Finding(
                check="partition",
                severity=Severity.ERROR,
                problem=f"there is no partition {name}",
                why="sbatch refuses the job",
                remedy=f"set cluster.partition to one of {names}",
            )
    # where a plugin of the site chooses the partition, none has to be named
    by_site = settings.text("JobSubmitPlugins")
    if request.is_typed and not typed and not by_site and not any(one.is_default for one in known):
        yield Finding(
            check="partition",
            severity=Severity.ERROR,
            problem="there is no default partition",
            why="sbatch refuses the job",
            remedy=f"set cluster.partition to one of {names}",
        )


def _partition(partition: Partition, known: Sequence[Partition], request: Request) -> Iterator[Finding]:
    cluster = request.cluster
    key = f"partition {partition.name}"
    # a quality of service may allow more (sacctmgr(1), PartitionTimeLimit)
    severity = Severity.WARNING if cluster.qos or partition.values.get("QoS", "N/A") != "N/A" else Severity.ERROR
    if partition.state != "UP":
        yield Finding(
            check="partition",
            severity=Severity.ERROR,
            problem=f"{key} is {partition.state}",
            why="jobs don't start there",
            remedy=f"set cluster.partition to one of {listed([one.name for one in known])}",
        )
    limit = partition.max_time_min
    if limit is not None and cluster.time_limit_min > limit:
        yield Finding(
            check="partition",
            severity=severity,
            problem=f"{key} allows {limit} min, but cluster.time_limit_min={cluster.time_limit_min}",
            why="the job stays in the queue, or sbatch refuses it",
            remedy=f"set cluster.time_limit_min={limit}: a run continues in as many jobs as it needs",
        )
    if partition.max_nodes is not None and request.nodes > partition.max_nodes:
        yield Finding(
            check="partition",
            severity=severity,
            problem=f"{key} gives a job at most {partition.max_nodes} nodes, but the run asks for {request.nodes}",
            why="the job stays in the queue, or sbatch refuses it",
            remedy="lower nodes, or set cluster.partition",
        )


def _preemption(partition: Partition, request: Request) -> Iterator[Finding]:
    if partition.preempt_mode.startswith("OFF"):
        return
    if "SUSPEND" in partition.preempt_mode:
        yield Finding(
            check="preemption",
            severity=Severity.WARNING,
            problem=f"partition {partition.name} suspends preempted jobs",
            why="a suspended rank can't answer, and those on other nodes may take that for a hang",
            remedy="raise health.hang_timeout_s above the time for which jobs are suspended",
        )
    elif not partition.grace_time_s and not request.saves_often:
        yield Finding(
            check="preemption",
            severity=Severity.WARNING,
            problem=f"partition {partition.name} kills preempted jobs without a grace time",
            why="the steps since the last checkpoint are computed again",
            remedy="set checkpoint.every_min=10",
        )


def _account(settings: Settings, request: Request) -> Iterator[Finding]:
    """Find limits of the account that SLURM enforces (slurm.conf(5), AccountingStorageEnforce)."""
    enforced, account = settings.text("AccountingStorageEnforce"), request.cluster.account
    if "associations" not in enforced or not request.accounts or not request.is_typed:
        return
    # the database has lower case (sacctmgr(1))
    own = [one for one in request.accounts if account is None or account.lower() == one.account]
    if not own:
        yield Finding(
            check="account",
            severity=Severity.ERROR,
            problem=f"you have no account {account}",
            why="sbatch refuses the job",
            remedy=f"set cluster.account to one of {listed(dict.fromkeys(one.account for one in request.accounts))}",
        )
        return
    limits = [one.max_wall_min for one in own]
    longest = max((limit for limit in limits if limit is not None), default=None)
    if "limits" in enforced and None not in limits and longest is not None and longest < request.cluster.time_limit_min:
        yield Finding(
            check="account",
            severity=Severity.WARNING,  # a quality of service comes before it
            problem=f"your account allows {longest} min, but cluster.time_limit_min={request.cluster.time_limit_min}",
            why="the job stays in the queue, or sbatch refuses it",
            remedy=f"set cluster.time_limit_min={longest}: a run continues in as many jobs as it needs",
        )


def _kill_wait(settings: Settings) -> Iterator[Finding]:
    seconds = settings.number("KillWait")
    if seconds is not None and seconds < EXITING_S:
        yield Finding(
            check="kill wait",
            severity=Severity.NOTE,
            problem=f"KillWait={seconds} s: SLURM kills the ranks that soon after a cancel or the time limit",
            why="a save that has begun may not be finished",
            remedy="raise cluster.signal_delay_s, so that the save before a time limit begins earlier",
        )


def _tracking(settings: Settings) -> Iterator[Finding]:
    kind = settings.text("ProctrackType").rpartition("/")[2]
    if kind in {"linuxproc", "pgid"}:
        yield Finding(
            check="process tracking",
            severity=Severity.NOTE,
            problem=f"SLURM tracks processes by their parents (ProctrackType=proctrack/{kind})",
            why="a process that detaches itself may outlive its job, and keep memory or a GPU",
            remedy="nothing has to be done; ask for proctrack/cgroup if dead runs keep GPUs busy",
        )

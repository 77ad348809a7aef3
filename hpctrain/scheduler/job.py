"""A SLURM job: its states, SLURM's record of it, and why it waits in the queue.

Source of the explanations: `job_state_reason.c` of SLURM 26.05, and squeue(1), "JOB REASON CODES".
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from enum import StrEnum

from hpctrain.errors import SchedulerError

log = logging.getLogger("hpctrain.scheduler")


class JobState(StrEnum):
    """A job's state, as SLURM names it.

    Source: `job_state_string` in SLURM's `slurm_protocol_defs.c`, 20.11 to 26.05.
    """

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    COMPLETING = "COMPLETING"
    CONFIGURING = "CONFIGURING"
    EXPEDITING = "EXPEDITING"
    POWER_UP_NODE = "POWER_UP_NODE"
    REQUEUED = "REQUEUED"
    REQUEUE_FED = "REQUEUE_FED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    RESIZING = "RESIZING"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    REVOKED = "REVOKED"
    SIGNALING = "SIGNALING"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    STAGE_OUT = "STAGE_OUT"
    STOPPED = "STOPPED"
    UNKNOWN = "UNKNOWN"
    """A state that this version of hpctrain doesn't know; such a job counts as running."""

    @property
    def is_pending(self) -> bool:
        """Whether the job is in the queue, back in it, or held in it."""
        return self in _PENDING

    @property
    def is_finished(self) -> bool:
        """Whether the job is over; only a requeue by hand starts it again."""
        return self in _FINISHED

    @property
    def is_running(self) -> bool:
        """Whether the job holds nodes, also while they boot and while it ends."""
        return not (self.is_pending or self.is_finished)

    @classmethod
    def parse(cls, text: str) -> JobState:
        """Parse the output of squeue, scontrol or sacct, such as `RUNNING`, `CANCELLED by 1000` or `COMPLETED+`.

        Raises:
            SchedulerError: it isn't the name of a state.
        """
        name = text.split(maxsplit=1)[0].rstrip("+") if text.strip() else ""
        if not re.fullmatch(r"[A-Z][A-Z_]*", name):
            raise SchedulerError(f"expected a state of a SLURM job, such as RUNNING, found {text!r}")
        try:
            return cls(name)
        except ValueError:
            log.warning("a job is in state %s, which this hpctrain doesn't know; treating the job as running", name)
            return cls.UNKNOWN


_PENDING = ("PENDING", "EXPEDITING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_FINISHED = (
    *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"),
    *("OUT_OF_MEMORY", "REVOKED"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """One job, or one task of a job array, as SLURM described it at one moment.

    Times are in seconds since the epoch. None means that SLURM doesn't know the value, or the command doesn't print it.
    """

    job_id: str
    """`12`, `12_3` for a task of an array, or `12_[4-9%2]` for the tasks of one that are still in the queue."""
    number: int
    """SLURM's number for the job itself: each task of an array gets its own when it starts."""
    state: JobState
    reason: str = ""
    """SLURM's code for why it is in this state; `explain_pending` explains it."""
    restarts: int | None = None
    """How often it was requeued. sacct doesn't print it."""
    start_time: int | None = None
    """For a pending job: when SLURM expects it to start."""
    end_time: int | None = None
    """For a running job: when SLURM will end it, which is the deadline during a preemption."""
    preempt_time: int | None = None
    """When its preemption began. sacct doesn't print it."""
    requeue: bool | None = None
    """Whether SLURM may requeue it. sacct doesn't print it."""
    is_held: bool = False
    """Whether its priority is 0: in the queue, it doesn't start until it is released. sacct doesn't print it."""


_HELD = {
    "JobHeldUser": "its user holds it",
    "JobHeldAdmin": "an administrator holds it, and may have to release it",
    "JobHoldMaxRequeue": "SLURM requeued it too often and holds it",
    "launch_failed_requeued_held": "SLURM couldn't start it and holds it; look at its log",
    "job_requeued_in_held_state": "it was requeued with a hold",
}
"""Reasons of held jobs, with underscores for the spaces that some versions print."""
_HELD_STATES = (JobState.REQUEUE_HOLD, JobState.RESV_DEL_HOLD, JobState.SPECIAL_EXIT)
_PLAIN = {
    "Resources": "it waits for nodes to become free; fewer nodes or a shorter time limit may start earlier",
    "Priority": "jobs with a higher priority come first; a shorter time limit may fit into a gap",
    "Dependency": "it waits for another job to end",
    "DependencyNeverSatisfied": "the job that it depends on ended differently, so it will never start: cancel it",
    "BeginTime": "its earliest start time is in the future; SLURM delays a requeued job, for two minutes by default",
    "JobArrayTaskLimit": "its array already runs as many tasks as cluster.max_parallel_runs allows",
    "PartitionTimeLimit": "it asks for more time than the partition allows; lower cluster.time_limit_min or change "
    "cluster.partition",
    "PartitionNodeLimit": "it asks for more or fewer nodes than the partition has; change nodes or cluster.partition",
    "PartitionDown": "the partition takes jobs but starts none now; wait, or change cluster.partition",
    "PartitionInactive": "the partition is inactive; change cluster.partition",
    "PartitionConfig": "its request doesn't fit the partition; change cluster.partition or request less",
    "ReqNodeNotAvail": "a node that it needs is down, drained, reserved or kept for maintenance that begins before its "
    "time limit is over; shorten cluster.time_limit_min, or ask for other nodes",
    "NodeDown": "a node that it needs is down",
    "BadConstraints": "no node satisfies its request, so it will never start; change cluster.constraint, "
    "cluster.gpu_type or the request",
    "Reservation": "its reservation hasn't begun, or is full",
    "ReservationDeleted": "its reservation is gone, so it will never start: cancel it",
    "Licenses": "it waits for a license",
    "InvalidAccount": "its account doesn't exist or isn't yours; change cluster.account",
    "AccountNotAllowed": "the partition doesn't admit its account; change cluster.account or cluster.partition",
    "InvalidQOS": "its quality of service doesn't exist or isn't yours; change cluster.qos",
    "QOSNotAllowed": "its account or partition doesn't admit its quality of service; change cluster.qos",
    "QOSUsageThreshold": "its account has used too much for this quality of service; change cluster.qos",
    "SchedDefer": "SLURM starts no jobs at submission here; it will consider this one soon",
    "Prolog": "its nodes are being prepared",
    "Cleaning": "it was requeued, and its last nodes are being cleaned",
    "NodeConfig": "its nodes are booting",
    "JobLaunchFailure": "SLURM couldn't start it; look at its log",
    "MaxMemPerLimit": "it asks for more memory than the partition allows; lower cluster.memory_gb",
    "SystemFailure": "SLURM itself, a file system or the network failed",
}
# whose limit, its kind, the resource, per whom: QOSMaxJobsPerUserLimit, AssocGrpCPUMinutesLimit
_LIMIT = re.compile(r"(QOS|Assoc)(?:iation)?(Grp|Max|Min|)(.+?)(Per[A-Z][a-z]+)?(?:Limit|NotSatisfied)?")
# the first part that a code contains counts: SubmitJobs is about submitted jobs, not about running ones
_RESOURCES = (
    ("Submit", "many submitted jobs"),
    ("SubJob", "many submitted jobs"),
    ("Job", "many running jobs"),
    ("Wall", "much time"),
    ("Time", "much time"),
    ("Node", "many nodes"),
    ("Mem", "much memory"),
    ("GRES", "many GPUs"),
    ("CPU", "many CPU cores"),
)


def explain_held(record: SlurmJob) -> str | None:
    """Explain why SLURM holds a job in the queue, and what releases it, in one line; None if it isn't held."""
    code = record.reason.replace(" ", "_")
    if not record.state.is_pending or not (record.is_held or record.state in _HELD_STATES or code in _HELD):
        return None
    text = _HELD.get(code, "SLURM holds it")
    return f"{text}; type `scontrol release {record.job_id}`" + (f" ({record.reason})" if record.reason else "")


def explain_pending(reason: str) -> str:
    """Explain why a job waits and what can be done about it, in one line.

    Args:
        reason: SLURM's code, such as `Resources`, or `ReqNodeNotAvail, UnavailableNodes:n[1-2]`.
    """
    code, _, detail = reason.strip().strip("()").partition(",")
    code, detail = code.strip(), detail.strip(" _")
    if not code or code == "None":
        return "SLURM hasn't considered it yet"
    text = _PLAIN.get(code) or _explain_limit(code)
    if text is None:
        return f"SLURM gives the reason {reason.strip()}"
    return f"{text} ({', '.join(part for part in (code, detail) if part)})"


def _explain_limit(code: str) -> str | None:
    """Explain a limit of a quality of service or an account, such as `QOSMaxJobsPerUserLimit`."""
    match = _LIMIT.fullmatch(code)
    if match is None:
        return None
    whose, bound, thing, per = match.groups()
    what, key = ("quality of service", "cluster.qos") if whose == "QOS" else ("account", "cluster.account")
    much = next((plain for part, plain in _RESOURCES if part.lower() in thing.lower()), "much")
    plain = much.partition(" ")[2] or "resources"
    if bound == "Min":
        return f"it asks for fewer {plain} than its {what} demands; ask for more, or change {key}"
    time = " times time" if "Minutes" in thing or "Mins" in thing else ""
    if time and per is None:
        if "Run" in thing:
            return (
                f"the remaining time of the running jobs times their {plain} is at the limit of its {what}; "
                f"wait, or change {key}"
            )
        return f"its {what} has used up its budget of {plain}{time}; wait, or change {key}"
    if per in {"PerJob", "PerNode"}:
        return f"it asks for more {plain}{time} than its {what} allows to one job; ask for less, or change {key}"
    jobs = "your jobs" if per or bound == "Max" else "the jobs of all users together"
    return f"{jobs} have as {much} as its {what} allows; it starts when some end, or change {key}"

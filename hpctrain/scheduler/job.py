"""The states of a SLURM job, and SLURM's record of a job."""

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


_PENDING = frozenset(
    {
        JobState.PENDING,
        JobState.EXPEDITING,
        JobState.REQUEUED,
        JobState.REQUEUE_FED,
        JobState.REQUEUE_HOLD,
        JobState.RESV_DEL_HOLD,
        JobState.SPECIAL_EXIT,
    }
)
_FINISHED = frozenset(
    {
        JobState.COMPLETED,
        JobState.CANCELLED,
        JobState.FAILED,
        JobState.TIMEOUT,
        JobState.NODE_FAIL,
        JobState.PREEMPTED,
        JobState.BOOT_FAIL,
        JobState.DEADLINE,
        JobState.OUT_OF_MEMORY,
        JobState.REVOKED,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
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
    held: bool = False
    """Whether its priority is 0: in the queue, it doesn't start until it is released. sacct doesn't print it."""

"""The states of a SLURM job."""

from __future__ import annotations

from enum import StrEnum

from hpctrain.errors import SchedulerError


class JobState(StrEnum):
    """A job's state, in SLURM's words.

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
        """From what squeue, scontrol or sacct print, such as `RUNNING`, `CANCELLED by 1000` or `COMPLETED+`.

        Raises:
            SchedulerError: no known state.
        """
        word = text.split(maxsplit=1)[0].rstrip("+") if text.strip() else ""
        try:
            return cls(word)
        except ValueError:
            raise SchedulerError(f"expected a state of a SLURM job, such as RUNNING, found {text!r}") from None


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

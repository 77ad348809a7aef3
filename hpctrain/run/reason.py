"""Why an attempt ended, and what each reason means wherever it is asked."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hpctrain.errors import ExitCode


class Reason(StrEnum):
    """Why an attempt ended."""

    COMPLETED = "completed"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    NODE_FAILURE = "node_failure"
    INFRASTRUCTURE = "infrastructure"
    HANG = "hang"
    FAILED = "failed"
    OUT_OF_MEMORY = "out_of_memory"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    STALLED = "stalled"

    @property
    def meaning(self) -> Meaning:
        """What follows from the reason."""
        return MEANINGS[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What a reason means.

    Attributes:
        exit_code: of a rank, a batch script or a waiting command.
        orderly: the ranks stopped together and saved first, so no steps are lost.
        by_slurm: SLURM is ending the job, and kills the batch script before long.
        machine_failure: the machine is to blame, as far as is known.
        may_stall: an attempt that ended for it and saved no step counts towards `cluster.requeue.max_stalled_attempts`.
        budget: the key under `cluster.requeue` that bounds how often the run survives it; None where nothing does.
            Reasons with the same key share one budget.
        why_final: why the run ends with it; empty where the run may be requeued.
    """

    exit_code: ExitCode = ExitCode.FAILED
    orderly: bool = False
    by_slurm: bool = False
    machine_failure: bool = False
    may_stall: bool = True
    budget: str | None = None
    why_final: str = ""

    @property
    def resumable(self) -> bool:
        """Whether a run that nothing continues is interrupted; otherwise it is completed, failed or cancelled."""
        return self.exit_code is ExitCode.INTERRUPTED

    @property
    def requeued(self) -> bool:
        """Whether the run may continue by itself."""
        return not self.why_final

    @property
    def final(self) -> bool:
        """Whether the run is over: nothing continues it, and only its user can make it longer or try again."""
        return not self.requeued and not self.resumable


_MACHINE_FAILURE = Meaning(machine_failure=True, budget="max_failures")

MEANINGS = {
    Reason.COMPLETED: Meaning(exit_code=ExitCode.FINISHED, orderly=True, why_final="completed"),
    Reason.PREEMPTED: Meaning(
        exit_code=ExitCode.INTERRUPTED, orderly=True, by_slurm=True, may_stall=False, budget="max_preemptions"
    ),
    Reason.TIME_LIMIT: Meaning(exit_code=ExitCode.INTERRUPTED, orderly=True, by_slurm=True, budget="max_time_limits"),
    # SLURM requeues the job by itself, so there is no budget to spend
    Reason.NODE_FAILURE: Meaning(exit_code=ExitCode.INTERRUPTED, by_slurm=True, may_stall=False),
    Reason.INFRASTRUCTURE: _MACHINE_FAILURE,
    Reason.HANG: _MACHINE_FAILURE,
    Reason.OUT_OF_MEMORY: _MACHINE_FAILURE,
    Reason.FAILED: Meaning(why_final="the task raised an error, and would raise it again"),
    Reason.CANCELLED: Meaning(
        exit_code=ExitCode.CANCELLED, orderly=True, by_slurm=True, why_final="cancelled by its user: never requeued"
    ),
    # scontrol requeue would also revive a job that its user has cancelled
    Reason.INTERRUPTED: Meaning(
        exit_code=ExitCode.INTERRUPTED,
        orderly=True,
        why_final="stopped by a signal that SLURM's record of the job doesn't explain: never requeued",
    ),
    Reason.STALLED: Meaning(why_final="no progress"),
}

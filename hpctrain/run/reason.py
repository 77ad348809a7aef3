"""The reasons for which an attempt ends, and the meaning of each one for every other module."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hpctrain.errors import ExitCode


class Reason(StrEnum):
    """The reason for which an attempt ended."""

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
    PAUSED = "paused"
    STALLED = "stalled"

    @property
    def meaning(self) -> Meaning:
        """The consequences of the reason."""
        return MEANINGS[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """The consequences of a reason.

    Attributes:
        exit_code: of a rank, a batch script or a waiting command.
        orderly: the ranks stopped together and saved first, so no steps are lost.
        by_slurm: SLURM is ending the job, and kills the batch script soon.
        requeued_by_slurm: SLURM requeues the job by itself.
        machine_failure: the machine is probably the cause.
        may_stall: an attempt that ended for it and saved no step counts towards `cluster.requeue.max_stalled_attempts`.
        stays_in_allocation: new ranks start in the same allocation or not at all.
        budget: the key under `cluster.requeue` that bounds how often the run survives it; None for no bound.
            Reasons with the same key share one budget.
        why_final: why the run ends with it; empty if the run may be requeued.
    """

    exit_code: ExitCode = ExitCode.FAILED
    orderly: bool = False
    by_slurm: bool = False
    requeued_by_slurm: bool = False
    machine_failure: bool = False
    may_stall: bool = True
    stays_in_allocation: bool = False
    budget: str | None = None
    why_final: str = ""

    @property
    def resumable(self) -> bool:
        """Whether a run that ended for it is interrupted or paused, and not completed, failed or cancelled."""
        return self.exit_code is ExitCode.INTERRUPTED

    @property
    def requeued(self) -> bool:
        """Whether the run may continue by itself; if not, only its user, or a search, continues it or tries again."""
        return not self.why_final

    @property
    def batch_script_requeues(self) -> bool:
        """Whether the batch script must requeue the job before SLURM kills it; false if SLURM requeues by itself."""
        return self.by_slurm and self.requeued and not self.requeued_by_slurm


_MACHINE_FAILURE = Meaning(machine_failure=True, budget="max_failures")

MEANINGS = {
    Reason.COMPLETED: Meaning(exit_code=ExitCode.FINISHED, orderly=True, why_final="completed"),
    Reason.PREEMPTED: Meaning(
        exit_code=ExitCode.INTERRUPTED, orderly=True, by_slurm=True, may_stall=False, budget="max_preemptions"
    ),
    Reason.TIME_LIMIT: Meaning(exit_code=ExitCode.INTERRUPTED, orderly=True, by_slurm=True, budget="max_time_limits"),
    # no budget: SLURM decides how often it requeues the job
    Reason.NODE_FAILURE: Meaning(
        exit_code=ExitCode.INTERRUPTED, by_slurm=True, requeued_by_slurm=True, may_stall=False
    ),
    Reason.INFRASTRUCTURE: _MACHINE_FAILURE,
    Reason.HANG: _MACHINE_FAILURE,
    Reason.OUT_OF_MEMORY: _MACHINE_FAILURE,
    Reason.FAILED: Meaning(why_final="its own code failed, and would fail again"),
    Reason.CANCELLED: Meaning(
        exit_code=ExitCode.CANCELLED, orderly=True, by_slurm=True, why_final="cancelled by its user: never requeued"
    ),
    # A signal that SLURM's record doesn't explain may be a message that slurmctld meant for the job before a requeue,
    # and sent again (seen on SLURM 22.05): it says nothing about the run. A requeue of ours could revive a job that its
    # user has cancelled; a new step can't.
    Reason.INTERRUPTED: Meaning(
        exit_code=ExitCode.INTERRUPTED, orderly=True, may_stall=False, stays_in_allocation=True, budget="max_failures"
    ),
    Reason.PAUSED: Meaning(
        exit_code=ExitCode.INTERRUPTED, orderly=True, may_stall=False, why_final="trainer.pause_at_step is reached"
    ),
    Reason.STALLED: Meaning(why_final="no progress"),
}
"""A new reason is a row here, and its `budget` a key of `config.cluster.Requeue`. It is detected from a rank's error
(`rank.classification`) or a program's end (`program.output`), from SLURM's record of a job that ends or has ended
(`BY_STATE` and `diagnose` in `attempt.termination`: a branch before those of preemption and time limit, which take what
nothing else explains), or from the exit records of all ranks (`attempt.outcome`)."""

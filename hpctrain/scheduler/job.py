"""What SLURM knows about one job."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.scheduler.state import JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job, or one task of a job array, as SLURM described it at one moment.

    Times are in seconds since the epoch. None is what the command that was asked doesn't tell, or SLURM doesn't know.
    """

    job_id: str
    """`12`, `12_3` for a task of an array, or `12_[4-9%2]` for the tasks of one that are still in the queue."""
    number: int
    """Of the job itself: each task of an array gets its own when it starts."""
    name: str
    partition: str
    state: JobState
    reason: str = ""
    """Why it is in this state, in SLURM's word; for a person see `explain_pending`."""
    restarts: int | None = None
    """How often it was requeued. sacct doesn't tell."""
    exit_code: tuple[int, int] | None = None
    """Of the batch script: its exit code, and the signal that ended it or 0."""
    submit_time: int | None = None
    eligible_time: int | None = None
    start_time: int | None = None
    """For a pending job: when SLURM expects it to start."""
    end_time: int | None = None
    """For a running job: when SLURM will end it, which is the deadline during a preemption."""
    preempt_time: int | None = None
    """When its preemption began. sacct doesn't tell."""
    time_limit_s: int | None = None
    """None also where there is no limit."""
    nodes: tuple[str, ...] = ()
    batch_host: str | None = None
    """The node of the batch script. sacct doesn't tell."""
    requeue: bool | None = None
    """Whether SLURM may requeue it. sacct doesn't tell."""
    stdout_path: str | None = None
    """Where the batch script's output goes. Only scontrol tells."""

"""Where a run stands: a judgement from the ledger, the launching process, and the scheduler's view of its jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from hpctrain.run.ledger import Attempt
from hpctrain.run.owner import Owner
from hpctrain.run.reason import Reason

OWN_FAULT = ("FAILED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
"""SLURM's words for jobs that it doesn't run again."""


class RunState(StrEnum):
    """Where a run stands."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"

    @property
    def may_change(self) -> bool:
        """Whether the run may move on without anybody doing anything."""
        return self in (RunState.QUEUED, RunState.STARTING, RunState.RUNNING)


class JobPhase(StrEnum):
    """Where a job stands."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class JobView:
    """What the scheduler says about one job of a run.

    Attributes:
        phase: where it stands.
        detail: SLURM's word for how it ended; for a pending job why it waits, in plain words.
        may_start: epoch seconds at which a pending job is expected to start, where SLURM foresees it.
    """

    phase: JobPhase
    detail: str = ""
    may_start: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a judgement is made from.

    Attributes:
        attempt: the newest claim, with what the ledger knows of it; number 0 before the first.
        owner: the process that launched that attempt on its own machine.
        cancelled_at: when the user cancelled the run, if nothing was submitted after it; epoch seconds.
        job_ids: of the run, oldest first.
        jobs: the scheduler's view by job id, None for one that it doesn't know (any more); None altogether where it
            can't be asked from here.
    """

    attempt: Attempt
    owner: Owner | None = None
    cancelled_at: float | None = None
    job_ids: tuple[str, ...] = ()
    jobs: Mapping[str, JobView | None] | None = None

    def in_phase(self, phase: JobPhase) -> dict[str, JobView]:
        """The run's jobs that are in a phase, oldest first."""
        found = {job_id: (self.jobs or {}).get(job_id) for job_id in self.job_ids}
        return {job_id: view for job_id, view in found.items() if view is not None and view.phase is phase}


def judge(evidence: Evidence) -> tuple[RunState, str]:
    """Where the run stands, and why in one line; empty where there is nothing to say."""
    attempt, owner = evidence.attempt, evidence.owner
    cancelled = evidence.cancelled_at is not None and evidence.cancelled_at >= (attempt.start_time or 0.0)
    stopping = "it was told to stop" if cancelled else ""
    if attempt.open and owner is not None and owner.alive:
        return (RunState.STARTING if attempt.start_time is None else RunState.RUNNING), stopping
    if pending := list(evidence.in_phase(JobPhase.PENDING).values()):
        return RunState.QUEUED, pending[-1].detail
    running = list(evidence.in_phase(JobPhase.RUNNING))
    # the job of an attempt that ended for good is about to end as well
    over = attempt.reason is not None and attempt.reason.meaning.final
    if running and not (over and running == [attempt.job_id]):
        return (RunState.STARTING if attempt.start_time is None or attempt.reason else RunState.RUNNING), stopping
    if attempt.reason is Reason.COMPLETED:
        return RunState.COMPLETED, ""
    if cancelled:
        return RunState.CANCELLED, ""
    return _judge_silent(evidence) if attempt.open else _judge_ended(evidence)


def _judge_ended(evidence: Evidence) -> tuple[RunState, str]:
    """The newest attempt has an end, and nothing is known to follow."""
    attempt = evidence.attempt
    note = f"{attempt.reason}: {attempt.detail}" if attempt.detail else str(attempt.reason)
    if attempt.reason is Reason.CANCELLED:
        return RunState.CANCELLED, attempt.detail
    assert attempt.reason is not None
    if evidence.job_ids and evidence.jobs is None and not attempt.reason.meaning.final:
        return RunState.INTERRUPTED, f"{note}; whether it waits in the queue can't be asked from here"
    return (RunState.INTERRUPTED if attempt.reason.meaning.resumable else RunState.FAILED), note


def _judge_silent(evidence: Evidence) -> tuple[RunState, str]:
    """The newest attempt has no end, or there is none, and nothing is known to be queued or running."""
    owner, attempt = evidence.owner, evidence.attempt
    if owner is not None:
        if owner.alive is None:
            return RunState.UNKNOWN, f"it was started on {owner.host}: ask there"
        return RunState.INTERRUPTED, f"process {owner.pid} on {owner.host} is gone and recorded no end"
    if not evidence.job_ids:
        known = (
            "it was started by hand, and no process or job is known" if attempt.attempt else "nothing was started yet"
        )
        return RunState.UNKNOWN, known
    if evidence.jobs is None:
        return RunState.UNKNOWN, "SLURM can't be asked from here"
    return _judge_job(evidence.job_ids[-1], evidence.jobs.get(evidence.job_ids[-1]), attempt)


def _judge_job(job_id: str, view: JobView | None, attempt: Attempt) -> tuple[RunState, str]:
    """No end was recorded: what SLURM says about the last job is all there is."""
    silent = f"attempt {attempt.attempt} recorded no end" if attempt.attempt else "no attempt began"
    if view is None:
        return RunState.INTERRUPTED, f"SLURM no longer knows job {job_id}, and {silent}"
    note = f"job {job_id} ended as {view.detail}, and {silent}"
    if view.detail == "CANCELLED":
        return RunState.CANCELLED, note
    return (RunState.FAILED if view.detail in OWN_FAULT else RunState.INTERRUPTED), note

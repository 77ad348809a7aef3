"""The state of a run, derived from its ledger, the process that launched it, and SLURM's records of its jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from hpctrain.run.launcher import Owner
from hpctrain.run.ledger import Attempt
from hpctrain.run.reason import Reason
from hpctrain.scheduler.job import JobState, SlurmJob, explain_held, explain_pending

NOT_REQUEUED = (JobState.FAILED, JobState.OUT_OF_MEMORY, JobState.BOOT_FAIL, JobState.DEADLINE)
"""States of jobs that SLURM doesn't run again."""
NOT_ASKED = "SLURM will be asked about its job in a moment"
"""The reason for the state of a run whose newest job SLURM has not been asked about yet."""


class RunState(StrEnum):
    """The state of a run."""

    PREPARED = "prepared"
    QUEUED = "queued"
    HELD = "held"
    STARTING = "starting"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    UNREADABLE = "unreadable"

    @property
    def may_change(self) -> bool:
        """Whether the run may still reach another state: it trains, or waits in the queue."""
        return self in (RunState.QUEUED, RunState.HELD, RunState.STARTING, RunState.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The facts from which the state of a run is derived.

    Attributes:
        attempt: the newest claim, with what the ledger knows of it; number 0 before the first.
        owner: the process that launched that attempt on its own machine.
        cancelled_at: when the user cancelled the run, if nothing was submitted after it; epoch seconds.
        job_ids: the run's jobs, oldest first.
        left_jobs: those that work for the run no longer, whatever SLURM's record of them is.
        submission: job id and time of the newest submission, in epoch seconds; None without one.
        ended_in_setup: whether the newest job, by its log, ended at a line of cluster.setup after the newest attempt.
        jobs: SLURM's record of each job that it was asked about, None for a job that it doesn't know or no longer
            remembers; None as a whole if SLURM can't be reached.
    """

    attempt: Attempt
    owner: Owner | None = None
    cancelled_at: float | None = None
    job_ids: tuple[str, ...] = ()
    left_jobs: frozenset[str] = frozenset()
    submission: tuple[str, float] | None = None
    ended_in_setup: bool = False
    jobs: Mapping[str, SlurmJob | None] | None = None

    @property
    def is_cancelled(self) -> bool:
        """Whether the user cancelled the run after its newest attempt began."""
        return self.cancelled_at is not None and self.cancelled_at >= (self.attempt.start_time or 0.0)

    @property
    def known_jobs(self) -> dict[str, SlurmJob]:
        """SLURM's records of the jobs that work for the run, as far as it knows them, oldest first."""
        records = ((job_id, (self.jobs or {}).get(job_id)) for job_id in self.job_ids if job_id not in self.left_jobs)
        return {job_id: record for job_id, record in records if record is not None}


def job_that_may_run(facts: RunFacts) -> str | None:
    """The job that may still be queued or running, by the records alone; None if no job is left.

    For a caller that can't reach SLURM: each resume has required that the earlier jobs were over, so only the newest
    one counts.
    """
    attempt = facts.attempt
    newest = _newest_job(facts)
    ended_for_good = attempt.reason is not None and not attempt.reason.meaning.requeued and not attempt.continues
    return None if newest in facts.left_jobs or (newest == attempt.job_id and ended_for_good) else newest


def unstarted_job(facts: RunFacts) -> str | None:
    """The newest job, if it is over, was submitted after the newest attempt, and began none of its own."""
    newest = _newest_job(facts)
    record = facts.known_jobs.get(newest or "")
    if record is None or record.state.is_pending or record.state.is_running:
        return None
    # a claim alone doesn't name its job
    claimed = facts.attempt.attempt > 0 and facts.attempt.start_time is None
    return None if claimed or newest == facts.attempt.job_id else newest


def _newest_job(facts: RunFacts) -> str | None:
    attempt, owner = facts.attempt, facts.owner
    began = attempt.start_time if attempt.start_time is not None or owner is None else owner.written
    if facts.submission is not None and (began is None or facts.submission[1] > began):
        return facts.submission[0]
    return attempt.job_id


def derive_state(facts: RunFacts) -> tuple[RunState, str]:
    """Derive the state of a run, and the reason in one line, which is empty if the state needs none."""
    attempt, owner = facts.attempt, facts.owner
    stopping = "it was asked to stop" if facts.is_cancelled else ""
    # that a local process lives is certain; everything below depends on records that may be late
    if attempt.open and owner is not None and owner.alive:
        return (RunState.STARTING if attempt.start_time is None else RunState.RUNNING), stopping
    if pending := [record for record in facts.known_jobs.values() if record.state.is_pending]:
        note = explain_held(pending[-1])
        return (RunState.QUEUED, explain_pending(pending[-1].reason)) if note is None else (RunState.HELD, note)
    running = [job_id for job_id, record in facts.known_jobs.items() if record.state.is_running]
    # the job of an attempt that ended for good is about to end as well
    ended_for_good = attempt.reason is not None and not attempt.reason.meaning.requeued
    if running and not (ended_for_good and running == [attempt.job_id]):
        return (RunState.STARTING if attempt.start_time is None or attempt.reason else RunState.RUNNING), stopping
    # a cancellation after the last step changed nothing, unless a newer job was to train the run further
    if attempt.reason is Reason.COMPLETED and unstarted_job(facts) is None:
        return RunState.COMPLETED, attempt.detail
    if facts.is_cancelled and not (attempt.open and owner is not None and owner.alive is None):
        return RunState.CANCELLED, ""
    return _state_when_stopped(facts)


def _state_when_stopped(facts: RunFacts) -> tuple[RunState, str]:
    if facts.ended_in_setup:
        # also a job that has been requeued, whose earlier attempt has an end
        return RunState.FAILED, f"job {facts.job_ids[-1]} ended before an attempt began"
    if (job_id := unstarted_job(facts)) is not None:
        return _state_by_job(job_id, facts.known_jobs[job_id], Attempt(attempt=0))
    return _state_without_end(facts) if facts.attempt.open else _state_by_reason(facts)


def _state_by_reason(facts: RunFacts) -> tuple[RunState, str]:
    """Derive the state from the newest attempt's recorded end; no other attempt is known to follow."""
    attempt = facts.attempt
    if attempt.reason is Reason.CANCELLED:
        return RunState.CANCELLED, attempt.detail
    if attempt.reason is Reason.PAUSED:
        return RunState.PAUSED, Reason.PAUSED.meaning.why_final
    assert attempt.reason is not None
    state = RunState.INTERRUPTED if attempt.reason.meaning.resumable else RunState.FAILED
    # a state that is called as its reason is named once
    note = ": ".join(filter(None, [attempt.reason.value if attempt.reason.value != state else "", attempt.detail]))
    # SLURM may have requeued the job, and only SLURM knows
    if set(facts.job_ids) - facts.left_jobs and facts.jobs is None and attempt.reason.meaning.requeued:
        return RunState.INTERRUPTED, "; ".join(
            filter(None, [note, "it may be queued: SLURM can't be reached from here"])
        )
    return state, note


def _state_without_end(facts: RunFacts) -> tuple[RunState, str]:
    """Derive the state of a run that recorded no end, and isn't known to be queued or running."""
    owner, attempt = facts.owner, facts.attempt
    if owner is not None:
        if owner.alive is None:
            stop_note = ", and was asked to stop" if facts.is_cancelled else ""
            return RunState.UNKNOWN, f"it was started on {owner.host}{stop_note}: run `status` there"
        gone = f"process {owner.pid} on {owner.host} is gone and recorded no end"
        return RunState.INTERRUPTED, f"{gone}: it was killed, or it crashed"
    if not facts.job_ids:
        prepared = RunState.PREPARED, "it has not been started yet"
        by_hand = RunState.UNKNOWN, "it was started by hand, so no process or job of it is known"
        return by_hand if attempt.attempt else prepared
    if facts.job_ids[-1] in facts.left_jobs:
        note = f"job {facts.job_ids[-1]} works for it no longer, and attempt {attempt.attempt} recorded no end"
        return RunState.INTERRUPTED, note
    if facts.jobs is None or facts.job_ids[-1] not in facts.jobs:
        return RunState.UNKNOWN, "SLURM can't be reached from here" if facts.jobs is None else NOT_ASKED
    return _state_by_job(facts.job_ids[-1], facts.jobs.get(facts.job_ids[-1]), attempt)


def _state_by_job(job_id: str, record: SlurmJob | None, attempt: Attempt) -> tuple[RunState, str]:
    """Derive the state from SLURM's record of the last job, since the attempt recorded no end."""
    no_end = f"attempt {attempt.attempt} recorded no end" if attempt.attempt else "no attempt began"
    if record is None:
        return RunState.INTERRUPTED, f"SLURM no longer knows job {job_id}, and {no_end}"
    note = f"job {job_id} ended as {record.state.value}, and {no_end}"
    if record.state is JobState.CANCELLED:
        return RunState.CANCELLED, note
    return (RunState.FAILED if record.state in NOT_REQUEUED else RunState.INTERRUPTED), note

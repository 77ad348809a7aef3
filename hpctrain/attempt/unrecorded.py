"""Attempts that died without a word: closed by the next one, with the cause that SLURM gives."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Any

from hpctrain.attempt.outcome import Outcome, close, judge_attempt
from hpctrain.attempt.taken_away import TakenAway
from hpctrain.errors import SchedulerError
from hpctrain.retry import until_it_can
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import first_cause, read_exit_records
from hpctrain.run.ledger import Attempt, Ledger
from hpctrain.run.reason import Reason
from hpctrain.scheduler.job import JobRecord
from hpctrain.scheduler.slurm import Slurm
from hpctrain.scheduler.state import JobState

BY_STATE = {
    JobState.CANCELLED: Reason.CANCELLED,
    JobState.TIMEOUT: Reason.TIME_LIMIT,
    JobState.DEADLINE: Reason.TIME_LIMIT,
    JobState.PREEMPTED: Reason.PREEMPTED,
    JobState.OUT_OF_MEMORY: Reason.OUT_OF_MEMORY,
    JobState.NODE_FAIL: Reason.NODE_FAILURE,
    JobState.BOOT_FAIL: Reason.NODE_FAILURE,
    JobState.FAILED: Reason.INFRASTRUCTURE,
}

log = logging.getLogger("hpctrain.launch")


def close_silent(directory: RunDirectory, slurm: Slurm, job_id: str | None, world_size: int) -> None:
    """Close every open attempt but those to come.

    Args:
        directory: the run.
        slurm: who is asked.
        job_id: of the job that goes on now; None outside of SLURM.
        world_size: assumed for an attempt that never recorded its own.
    """
    ledger = Ledger(directory)
    known = {entry.attempt: entry for entry in ledger.attempts()}
    for number in range(1, ledger.last_claim() + 1):
        entry = known.get(number, Attempt(attempt=number))
        if not entry.open:
            continue
        ranks = entry.world_size or world_size
        outcome = judge_attempt(directory, number, ranks)
        # hpctrain closes an attempt before it asks for a requeue
        by = {"requeued_by": "slurm"} if job_id is not None and entry.job_id in (None, job_id) else {}
        if outcome.silent_ranks:
            outcome = _explained(directory, entry, outcome, slurm, job_id)
        log.info("attempt %d is closed: %s at step %d (%s)", number, outcome.reason.value, outcome.step, outcome.report)
        close(directory, number, ranks, outcome, closed_late=True, **by)


def close_silent_patiently(patience_s: float, directory: RunDirectory, *asked: Any) -> None:
    """`close_silent`; a file system that refuses gets so many seconds, and then they are left to a later attempt."""
    with contextlib.suppress(OSError):
        until_it_can(lambda: close_silent(directory, *asked), patience_s, "an earlier attempt can't be closed")


def _explained(directory: RunDirectory, entry: Attempt, outcome: Outcome, slurm: Slurm, job_id: str | None) -> Outcome:
    """The outcome with SLURM's word for why ranks were silent.

    A hang that was recorded gives way only to what SLURM knows for certain, and never where a rank was stuck by itself:
    ranks that wait for others do so on account of a dead node, too.
    """
    claim = directory.claim(entry.attempt)
    heard = TakenAway.read(claim)
    found = _Found(heard.reason, heard.evidence, certain=True) if heard else _ask(slurm, entry, job_id)
    if outcome.reason is Reason.HANG:
        cause = first_cause(read_exit_records(claim))
        if not found.certain or cause is None or not cause.blames_peer:
            return outcome
    return Outcome(found.reason, outcome.step, f"ended without a word: {found.why}")


@dataclass(frozen=True, slots=True)
class _Found:
    """Why an attempt ended without a word, and whether that is known or merely the likeliest."""

    reason: Reason
    why: str
    certain: bool = False


def _ask(slurm: Slurm, entry: Attempt, job_id: str | None) -> _Found:
    asked = entry.job_id or job_id
    if asked is None:
        return _Found(Reason.INFRASTRUCTURE, "its processes were killed, or their machine stopped")
    same_job = asked == job_id
    record = _record(slurm, asked, same_job=same_job)
    if record is not None and not same_job and not record.state.is_finished:
        return _Found(Reason.INTERRUPTED, f"job {asked} is still there, and this attempt takes over from it")
    if record is not None and record.state in BY_STATE:
        # that it failed says no more than that something did
        certain = record.state is not JobState.FAILED
        return _Found(BY_STATE[record.state], f"SLURM says {record.state.value}", certain)
    if same_job:
        return _requeued_by_itself(slurm, entry)
    return _Found(Reason.INFRASTRUCTURE, f"SLURM no longer knows job {asked}")


def _requeued_by_itself(slurm: Slurm, entry: Attempt) -> _Found:
    """SLURM put this very job back into the queue, and keeps no account of why."""
    try:
        failed = slurm.failed_nodes(entry.nodes, entry.start_time or 0.0)
    except SchedulerError as error:
        log.info("SLURM doesn't tell of the nodes: %s", error)
        return _Found(Reason.NODE_FAILURE, "SLURM requeued the job by itself")
    if not entry.nodes:
        return _Found(Reason.NODE_FAILURE, "SLURM requeued the job by itself")
    if failed:
        why = f"{' '.join(failed)} failed, and SLURM requeued the job"
        return _Found(Reason.NODE_FAILURE, why, certain=True)
    why = "SLURM requeued the job by itself, and its nodes are up: there was no time for a word"
    return _Found(Reason.PREEMPTED, why)


def _record(slurm: Slurm, job_id: str, *, same_job: bool) -> JobRecord | None:
    try:
        return slurm.before_requeue(job_id) if same_job else slurm.find([job_id])[job_id]
    except SchedulerError as error:
        log.info("no cause from SLURM for job %s: %s", job_id, error)
        return None

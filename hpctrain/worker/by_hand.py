"""Attempts whose ranks were started by hand, with srun or torchrun: rank zero closes them, and asks for the requeue."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace

from hpctrain.attempt.requeue import Action, Verdict, decide, unless_cancelled
from hpctrain.attempt.termination import Cause, diagnose
from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.cluster import Slurm as SlurmCluster
from hpctrain.config.requeue import Requeue
from hpctrain.config.root import Config
from hpctrain.errors import SchedulerError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import ExitRecord, first_cause, read_exit_records
from hpctrain.run.ledger import Attempt, Ledger
from hpctrain.run.reason import Reason
from hpctrain.run.times import read_times
from hpctrain.scheduler.patience import requeue, show
from hpctrain.scheduler.slurm import Slurm

log = logging.getLogger("hpctrain.train")


def close_by_hand(
    directory: RunDirectory,
    attempt: int,
    *,
    reason: Reason,
    step: int,
    detail: str,
    stop_signal: int | None = None,
    environment: ClusterEnvironment,
    config: Config,
) -> None:
    """Record the end and, after a preemption or near the time limit, put the job back into the queue.

    A requeue ends this process within the blink of an eye: it comes last. Failures need somebody outside of the dead
    ranks to judge them: without hpctrain's batch script they are recorded, and not requeued; but an error after a
    signal may be that of a child process which SLURM's signal reached, too.
    """
    ledger = Ledger(directory)
    saved = directory.saved_step
    _start_if_it_never_began(ledger, attempt, environment, saved)
    if reason is Reason.INTERRUPTED and not detail and environment.job_id is not None:
        reason = _second_opinion(environment.job_id, environment.restart_count, Reason.INTERRUPTED)
    before = [entry for entry in ledger.attempts() if entry.attempt < attempt]
    twice = bool(before) and bool(before[-1].extra.get("error_after_signal"))
    failed = reason is Reason.FAILED
    if failed and stop_signal is not None and not twice and environment.job_id is not None:
        reason = _second_opinion(environment.job_id, environment.restart_count, Reason.FAILED, stop_signal)
    late = {"error_after_signal": True} if failed and reason is not Reason.FAILED else {}
    verdict = Verdict(Action.END, reason, detail)
    if environment.job_id is not None and reason in (Reason.PREEMPTED, Reason.TIME_LIMIT):
        verdict = _verdict(ledger, Attempt(attempt=attempt, reason=reason, end_step=step), config)
        if verdict.action is Action.REQUEUE:
            verdict = unless_cancelled(
                verdict, show(Slurm(os.environ), environment.job_id), restarts=environment.restart_count
            )
        log.info("%s", verdict.why)
    if verdict.reason is not reason:
        detail = verdict.why
    extra = {"saved_step": saved, **late, **verdict.told()}
    told = ledger.end(attempt, reason=verdict.reason, step=step, detail=detail, **extra)
    if not told or verdict.action is not Action.REQUEUE:
        return
    assert environment.job_id is not None
    try:
        requeue(Slurm(os.environ), environment.job_id, restarts=environment.restart_count)
    except SchedulerError as error:
        log.warning(
            "the job could not be requeued: %s; to go on: sbatch the same script with run_dir=%s", error, directory.path
        )


def _second_opinion(job_id: str, restarts: int, otherwise: Reason, received: int | None = None) -> Reason:
    """Why the ranks were stopped, if SLURM had no time to say so before they saved, or an error was in between."""
    found = diagnose(received, show(Slurm(os.environ), job_id), restarts=restarts, now=time.time())
    return otherwise if found.cause is Cause.UNKNOWN else Reason(found.cause.value)


def _verdict(ledger: Ledger, ended: Attempt, config: Config) -> Verdict:
    """What follows from an end that isn't recorded yet: the record is to tell it."""
    policy = config.cluster.requeue if isinstance(config.cluster, SlurmCluster) else Requeue()
    saved = ledger.directory.saved_step
    known = {entry.attempt: entry for entry in ledger.attempts()}
    start = known[ended.attempt].start_step if ended.attempt in known else None
    known[ended.attempt] = replace(ended, start_step=saved if start is None else start, extra={"saved_step": saved})
    return decide([known[number] for number in sorted(known) if number <= ended.attempt], policy, in_allocation=1)


def close_silent_by_hand(directory: RunDirectory, environment: ClusterEnvironment) -> None:
    """Close the attempts that died without a word, before a new one begins."""
    ledger = Ledger(directory)
    known = {entry.attempt: entry for entry in ledger.attempts()}
    saved = directory.saved_step
    for number in range(1, ledger.last_claim() + 1):
        entry = known.get(number, Attempt(attempt=number))
        if not entry.open:
            continue
        if entry.start_time is None:
            ledger.start(number, job_id=None, nodes=(), world_size=environment.world_size, step=saved)
        again = bool(environment.restart_count) and entry.job_id == environment.job_id is not None
        records = read_exit_records(directory.claim(number))
        reason, detail = _as_recorded(records) or (
            (Reason.NODE_FAILURE, "ended without a word: SLURM requeued the job by itself")
            if again
            else (Reason.INFRASTRUCTURE, "ended without a word: its processes were killed, or their machine stopped")
        )
        seen = int(read_times(directory.claim(number)).get("last_step", 0))
        step = max(seen, saved, *(record.step for record in records.values()))
        ledger.end(number, reason=reason, step=step, detail=detail, saved_step=saved, closed_late=True)


def _as_recorded(records: Mapping[int, ExitRecord]) -> tuple[Reason, str] | None:
    """Why an attempt ended, from those of its ranks that left word; None where they only lost one that didn't."""
    cause = first_cause(records)
    if cause is not None:
        told = cause.reason, f"rank {cause.rank} on {cause.host}: {cause.message}"
        return None if cause.blames_peer and cause.reason is not Reason.HANG else told
    # such a record is written behind a barrier that all ranks passed with everything saved
    reasons = [record.reason for record in records.values() if record.reason is not Reason.COMPLETED]
    return (reasons[0], f"ranks stopped ({reasons[0].value})") if reasons else None


def _start_if_it_never_began(ledger: Ledger, attempt: int, environment: ClusterEnvironment, step: int) -> None:
    """Tell job and nodes of an attempt that failed before its ranks were ready."""
    if any(entry.attempt == attempt and entry.start_time is not None for entry in ledger.attempts()):
        return
    try:
        (ledger.directory.claim(attempt) / "began").open("x").close()
    except FileExistsError:
        return  # another rank that failed tells it
    place = environment
    ledger.start(attempt, job_id=place.job_id, nodes=place.nodes, world_size=place.world_size, step=step)

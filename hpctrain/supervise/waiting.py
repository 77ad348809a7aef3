"""Let a job wait in the queue until the runs before its run have completed (`after`).

SLURM's dependencies name jobs, and runs outlive jobs. On SLURM 22.05, `afterany` is fulfilled too early if a run
continues in a new job or its job is forgotten (MinJobAge), and a requeued job has lost its own dependency. `afterok`
reads a batch script's exit code, and leaves DependencyNeverSatisfied jobs behind. So SLURM starts the job when the jobs
of the other runs have ended, and this module decides by the states of the runs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hpctrain.attempt.notification import Notifier
from hpctrain.attempt.outcome import Outcome, record_end, resume_command
from hpctrain.errors import ExitCode, HpctrainError, SchedulerError
from hpctrain.launch.after import LOOK_AT_LEAST_EVERY_S, LOOK_EVERY_S
from hpctrain.phrases import listed
from hpctrain.run.checkpoints import saved_step
from hpctrain.run.directory import RunDirectory
from hpctrain.run.job_records import JobRecords
from hpctrain.run.ledger import EndFacts, Ledger
from hpctrain.run.reason import Reason
from hpctrain.status.before_launch import GONE, OtherRuns
from hpctrain.status.run_status import RunStatus
from hpctrain.status.state import RunState
from hpctrain.supervise.job import CurrentJob
from hpctrain.supervise.ranks import print_error

log = logging.getLogger("hpctrain.supervise")


def exit_code_before_attempts(job: CurrentJob, notifier: Notifier) -> int | None:
    """Decide at the start of a job whether the runs before its run let it begin.

    SLURM only starts the job when theirs have ended, and this looks at how: a requeued job ends more than once, a run
    may continue in another job, and some runs have none. A run that has begun doesn't look again when it is requeued,
    nor in a job that was submitted in its place.

    Args:
        job: of the batch script.
        notifier: starts the user's command.

    Returns:
        The batch script's exit code if the run ends or waits; None if it begins.

    Raises:
        OSError: the run directory is unavailable.
    """
    config = job.plan.config
    if not config.after or _has_begun(job):
        return None
    other_runs = OtherRuns.read(config.after, job.find)
    if other_runs.stopped and config.after_failure != "start":
        # once more: another may have been resumed between the look at its records and SLURM's answer
        other_runs = OtherRuns.read(config.after, job.find)
    removed = [status for status in other_runs.stopped if status.note == GONE]
    # a run that was removed can't be resumed
    final = other_runs.stopped if config.after_failure == "end" else removed
    if final and config.after_failure != "start":
        return _end(job, notifier, final)
    if other_runs.going or (other_runs.stopped and config.after_failure == "wait"):
        return _wait(job, other_runs)
    for status in other_runs.stopped:
        log.info("%s is %s; starting anyway (after_failure=start)", status.path, status.described)
    return None


def _has_begun(job: CurrentJob) -> bool:
    # an attempt that ended because of another run had no ranks
    attempts = [attempt for attempt in Ledger(job.directory).attempts() if attempt.had_ranks]
    if not attempts:
        return False
    # a new job may have been submitted in the place of one that can't be requeued
    return attempts[-1].job_id == job.job_id or JobRecords(job.directory).continues(job.job_id)


def _end(job: CurrentJob, notifier: Notifier, stopped: Sequence[RunStatus]) -> int:
    """Record that the run ends because others haven't completed."""
    first = next((status for status in stopped if status.state is not RunState.CANCELLED), stopped[0])
    reason = Reason.CANCELLED if first.state is RunState.CANCELLED else Reason.FAILED
    command = resume_command(job.directory)
    blockers = RunDirectory(first.path).as_typed + (f" (and {len(stopped) - 1} more)" if len(stopped) > 1 else "")
    report = (
        f"{blockers} is {_described(first)}, and this run starts only after it has completed; resume that run, then "
        f"this one: {command}; to start without it: {command} after_failure=start"
    )
    attempt = job.claim()
    outcome = Outcome(reason, saved_step(job.directory), report)
    record_end(
        job.directory,
        attempt,
        outcome,
        facts=EndFacts(after=str(first.path)),
        world_size=job.plan.resources.world_size,
        job_id=job.job_id,
    )
    log.info("the run ends before it begins: %s", reason.value)
    print_error(report)
    job.forbid_requeue(reason.meaning.exit_code)
    notifier.ended(attempt, outcome)
    notifier.finish()
    return reason.meaning.exit_code


def _wait(job: CurrentJob, other_runs: OtherRuns) -> int:
    """Put the job back into the queue until the other runs' jobs have ended, or for some minutes."""
    # a requeue would revive a job that its user has cancelled meanwhile
    termination = job.termination()
    is_cancelled = job.cancelled or job.ends_cancelled
    if is_cancelled or (termination is not None and termination.reason is Reason.CANCELLED):
        return ExitCode.CANCELLED
    waits_for = listed(f"{status.path} ({status.state})" for status in (*other_runs.going, *other_runs.stopped))
    log.info("the run waits for %s", waits_for)
    records = JobRecords(job.directory)
    seconds = min(LOOK_EVERY_S * 2 ** records.waits(job.job_id), LOOK_AT_LEAST_EVERY_S)
    records.wait(job.job_id)
    if not job.requeue():
        try:
            log.info("the run waits in job %s", job.resubmit((), continues=False))
        except HpctrainError as error:
            command = resume_command(job.directory)
            log.warning("the run can't wait any longer (%s); to start it later: %s", error, command)
        return ExitCode.INTERRUPTED
    if job.cancelled:  # meanwhile
        job.cancel_requeue()
        return ExitCode.CANCELLED
    try:
        # only now: SLURM refuses both for a running job (seen on SLURM 22.05), and accepts them while a requeued one
        # still completes; it starts that only after a while. Not by `requeuehold`: a supervisor that is killed before
        # the release leaves a held job
        job.delay(other_runs.job_ids, seconds)
    except SchedulerError as error:
        log.info("can't delay the job; it checks again when SLURM next starts it: %s", error)
    return ExitCode.INTERRUPTED


def _described(status: RunStatus) -> str:
    """The state of another run with its reason, unless that is a run before it, which has its own report."""
    is_of_a_third = bool(status.attempts) and not status.attempts[-1].had_ranks
    return str(status.state) if is_of_a_third else status.described

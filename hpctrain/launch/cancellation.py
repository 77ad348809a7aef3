"""Cancel runs: their jobs, or the processes that train them on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hpctrain.errors import HpctrainError
from hpctrain.files import write_json
from hpctrain.phrases import listed
from hpctrain.run.directory import RunDirectory
from hpctrain.run.job_records import JobRecords
from hpctrain.run.launcher import Owner
from hpctrain.run.ledger import Ledger
from hpctrain.scheduler.slurm import Slurm
from hpctrain.status.jobs import Jobs, job_ids, query_jobs
from hpctrain.status.run_status import status_of
from hpctrain.streams import Printer, print_warning


def cancel(directory: RunDirectory, warn: Printer = print_warning) -> str:
    """Cancel one run, and describe what was done.

    A queued run leaves the queue. A running one finishes its current step, saves if the time allows, and is never
    requeued.

    Args:
        directory: of the run.
        warn: gets a line if SLURM is there and doesn't answer.

    Raises:
        HpctrainError: the run is queued or running, and can't be reached from here.
    """
    (done,) = cancel_all([directory], warn)
    if isinstance(done, str):
        return done
    raise done


def cancel_all(
    directories: Sequence[RunDirectory], warn: Printer = print_warning
) -> list[str | HpctrainError | OSError]:
    """Cancel many runs as `cancel` does; SLURM is queried once, and all jobs are cancelled in few calls.

    Args:
        directories: of the runs.
        warn: gets a line if SLURM is there and doesn't answer.

    Returns:
        What was done by run, or why it can't be cancelled.
    """
    runs = [_Cancellation(directory) for directory in directories]
    for run in runs:
        with run.errors_kept():
            run.job_ids = job_ids(run.directory)
    jobs = query_jobs([job_id for run in runs for job_id in run.job_ids], warn)
    _cancel_jobs(runs, jobs)
    for run in runs:
        with run.errors_kept():
            if run.error is None:
                run.done += _stop_process(run.directory)
            if run.error is None and not run.done:
                run.done = [f"nothing to cancel: the run is {status_of(run.directory, jobs).state}"]
    return [run.error or "; ".join(run.done) for run in runs]


@dataclass
class _Cancellation:
    """The cancellation of one run; its error doesn't keep the others from being cancelled.

    Attributes:
        directory: of the run.
        job_ids: of its jobs.
        live: of those that aren't over, whether they are `pending` or `running`.
        done: what was done.
        error: why it can't be cancelled.
    """

    directory: RunDirectory
    job_ids: list[str] = field(default_factory=list)
    live: dict[str, str] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    error: HpctrainError | OSError | None = None

    @contextlib.contextmanager
    def errors_kept(self) -> Iterator[None]:
        """Keep an error that is raised in the context."""
        try:
            yield
        except (HpctrainError, OSError) as error:
            self.error = error


def _record_cancelled(directory: RunDirectory, *, cancelled: bool) -> None:
    # SLURM's record of a job that is being preempted doesn't show who ended it, so the supervisor reads this one
    with contextlib.suppress(OSError):  # a full disk must not keep a run from being cancelled
        JobRecords(directory).add({"cancelled": cancelled, "time": time.time()})


def _cancel_jobs(runs: Sequence[_Cancellation], jobs: Jobs | None) -> None:
    """Cancel the jobs of runs that aren't over."""
    for run in runs:
        if jobs is None and run.job_ids:
            problem = f"SLURM can't be reached from here to cancel job {listed(run.job_ids)}"
            run.error = HpctrainError(f"{problem}; run the command on a login node")
        for job_id in run.job_ids:
            job = None if jobs is None else jobs.get(job_id)
            if job is not None and not job.state.is_finished:
                run.live[job_id] = "pending" if job.state.is_pending else "running"
        if run.live:
            _record_cancelled(run.directory, cancelled=True)
    # tasks of several runs may be one job's
    live = list(dict.fromkeys(job_id for run in runs for job_id in run.live))
    refused = Slurm().cancel_all(live) if live else {}
    for run in runs:
        if failed := [job_id for job_id in run.live if job_id in refused]:
            if len(failed) == len(run.live):
                _record_cancelled(run.directory, cancelled=False)
            run.error = refused[failed[0]]
        run.done = [f"cancelled job {job_id}, which was {state}" for job_id, state in run.live.items()]


def _stop_process(directory: RunDirectory) -> list[str]:
    """Cancel the attempt that a process of this or another machine launched, if it may be running."""
    ledger = Ledger(directory)
    number = ledger.last_claim()
    owner = Owner.read(directory.attempt(number)) if number else None
    ended = any(attempt.attempt == number and not attempt.open for attempt in ledger.attempts())
    if owner is None or ended or owner.alive is False:
        return []
    takes_signals = owner.is_here and not owner.in_program
    # the process id may have been given to another program since
    if takes_signals and "hpctrain" not in owner.command:
        raise HpctrainError(
            f"process {owner.pid} should be the run's, but it is `{owner.command[:80]}`: no signal was sent"
        )
    again = directory.is_cancelled(number)
    problem = ""
    try:
        with directory.permissions():
            write_json(directory.stop_file(number), {"signal": None, "time": time.time(), "deadline": None})
    except OSError as error:
        problem = f"the stop file {directory.stop_file(number)} can't be written ({error.strerror})"
        if not takes_signals:
            raise HpctrainError(problem) from error
    _record_cancelled(directory, cancelled=True)
    # a second SIGINT would end it at once, without a save; a suspended process gets the first when it continues
    signals = [signal.SIGINT] if takes_signals and not again else []
    try:
        for signal_number in [*signals, signal.SIGCONT] if owner.is_here else []:
            os.kill(owner.pid, signal_number)
    except OSError as error:
        if problem:
            raise HpctrainError(f"process {owner.pid} can't be stopped: {error.strerror}; {problem}") from error
    place = f"process {owner.pid}" if owner.is_here else f"process {owner.pid} on {owner.host}"
    return [f"asked {place}{' once more' if again else ''} to stop after its current step and save"]

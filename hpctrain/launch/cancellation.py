"""Cancel runs: their jobs, or the processes that train them on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from hpctrain.errors import HpctrainError
from hpctrain.files import write_json
from hpctrain.phrases import listed
from hpctrain.run.directory import RunDirectory
from hpctrain.run.job_records import JobRecords
from hpctrain.run.launcher import Owner
from hpctrain.run.ledger import Ledger
from hpctrain.scheduler.slurm import Slurm
from hpctrain.status.report import Jobs, ask_slurm, job_ids, read_statuses
from hpctrain.streams import Report, print_warning

Result = TypeVar("Result")


def cancel(directory: RunDirectory, warn: Report = print_warning) -> str:
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
    directories: Sequence[RunDirectory], warn: Report = print_warning
) -> list[str | HpctrainError | OSError]:
    """Cancel many runs as `cancel` does; SLURM is asked once for all of them, and told in few calls.

    Args:
        directories: of the runs.
        warn: gets a line if SLURM is there and doesn't answer.

    Returns:
        What was done by run, or why it can't be cancelled.
    """
    ids = [_attempted(job_ids, directory) for directory in directories]
    jobs = ask_slurm([job_id for one in ids if not isinstance(one, Exception) for job_id in one], warn)
    cancelled = _cancel_jobs(directories, ids, jobs)

    def outcome(directory: RunDirectory, jobs_done: list[str] | HpctrainError | OSError) -> str:
        if isinstance(jobs_done, Exception):
            raise jobs_done
        if done := [*jobs_done, *_stop_process(directory)]:
            return "; ".join(done)
        (status,) = read_statuses([directory], warn, ask=lambda _ids, _warn: jobs)
        return f"nothing to cancel: the run is {status.state}"

    pairs = zip(directories, cancelled, strict=True)
    return [_attempted(partial(outcome, jobs_done=done), directory) for directory, done in pairs]


def _attempted(act: Callable[[RunDirectory], Result], directory: RunDirectory) -> Result | HpctrainError | OSError:
    """The result of a function, or its error: a run that can't be cancelled must not keep the others."""
    try:
        return act(directory)
    except (HpctrainError, OSError) as error:
        return error


def _record_cancelled(directory: RunDirectory, *, cancelled: bool) -> None:
    # SLURM's record of a job that is being preempted doesn't show who ended it, so the supervisor reads this one
    with contextlib.suppress(OSError):  # a full disk must not keep a run from being cancelled
        JobRecords(directory).add({"cancelled": cancelled, "time": time.time()})


def _cancel_jobs(
    directories: Sequence[RunDirectory], ids: Sequence[list[str] | HpctrainError | OSError], jobs: Jobs | None
) -> list[list[str] | HpctrainError | OSError]:
    """Cancel the jobs of runs that aren't over; return by run what was done, or why not."""
    live = [_live(one, jobs) for one in ids]
    for directory, one in zip(directories, live, strict=True):
        if one and not isinstance(one, Exception):
            _record_cancelled(directory, cancelled=True)
    present = [job_id for one in live if not isinstance(one, Exception) for job_id in one]
    # tasks of several runs may be one job's
    refused = Slurm().cancel_all(list(dict.fromkeys(present))) if present else {}
    outcomes: list[list[str] | HpctrainError | OSError] = []
    for directory, one in zip(directories, live, strict=True):
        if isinstance(one, Exception):
            outcomes.append(one)
        elif failed := [job_id for job_id in one if job_id in refused]:
            if len(failed) == len(one):
                _record_cancelled(directory, cancelled=False)
            outcomes.append(refused[failed[0]])
        else:
            outcomes.append([f"cancelled job {job_id}, which was {was}" for job_id, was in one.items()])
    return outcomes


def _live(ids: list[str] | HpctrainError | OSError, jobs: Jobs | None) -> dict[str, str] | HpctrainError | OSError:
    """Whether those of a run's jobs that aren't over are `pending` or `running`."""
    if isinstance(ids, Exception):
        return ids
    if jobs is None:
        problem = f"SLURM can't be reached from here to cancel job {listed(ids)}; run the command on a login node"
        return HpctrainError(problem) if ids else {}
    known = ((job_id, jobs.get(job_id)) for job_id in ids)
    return {
        job_id: "pending" if job.state.is_pending else "running"
        for job_id, job in known
        if job is not None and not job.state.is_finished
    }


def _stop_process(directory: RunDirectory) -> list[str]:
    """Cancel the attempt that a process of this or another machine launched, if it may be running."""
    ledger = Ledger(directory)
    number = ledger.last_claim()
    owner = Owner.read(directory.claim(number)) if number else None
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

"""Cancel a run: its jobs, or the process that trains it on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from hpctrain.errors import HpctrainError, SchedulerError
from hpctrain.phrases import listed
from hpctrain.run.directory import RunDirectory
from hpctrain.run.job_records import JobRecords
from hpctrain.run.ledger import Ledger
from hpctrain.run.owner import Owner
from hpctrain.scheduler.slurm import Slurm
from hpctrain.status.report import ask_slurm, job_ids, read_statuses
from hpctrain.streams import Report, print_warning
from hpctrain.worker.host_program import HostProgram


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
    if done := [*_cancel_jobs(directory, warn), *_stop_process(directory)]:
        return "; ".join(done)
    (status,) = read_statuses([directory], warn)
    return f"nothing to cancel: the run is {status.state}"


def _record_cancelled(directory: RunDirectory, *, cancelled: bool) -> None:
    # SLURM's record of a job that is being preempted doesn't show who ended it, so the supervisor reads this one
    with contextlib.suppress(OSError):  # a full disk must not keep a run from being cancelled
        JobRecords(directory).add({"cancelled": cancelled, "time": time.time()})


def _cancel_jobs(directory: RunDirectory, warn: Report) -> list[str]:
    ids = job_ids(directory)
    jobs = ask_slurm(ids, warn)
    if jobs is None:
        raise HpctrainError(
            f"SLURM can't be reached from here to cancel job {listed(ids)}; run the command on a login node"
        )
    done: list[str] = []
    for job_id in ids:
        record = jobs.get(job_id)
        if record is None or record.state.is_finished:
            continue
        _record_cancelled(directory, cancelled=True)
        try:
            Slurm().cancel(job_id)
        except SchedulerError:
            if not done:
                _record_cancelled(directory, cancelled=False)
            raise
        done.append(f"cancelled job {job_id}, which was {'pending' if record.state.is_pending else 'running'}")
    return done


def _stop_process(directory: RunDirectory) -> list[str]:
    ledger = Ledger(directory)
    number = ledger.last_claim()
    owner = Owner.read(directory.claim(number)) if number else None
    ended = any(attempt.attempt == number and not attempt.open for attempt in ledger.attempts())
    if owner is None or ended or owner.alive is False:
        return []
    if owner.alive is None:
        raise HpctrainError(f"it was started on {owner.host}, as process {owner.pid}: run the command there")
    if owner.pid == os.getpid() and (program := HostProgram.training(directory)) is not None:
        _record_cancelled(directory, cancelled=True)
        program.stop.ask(signal.SIGINT)
        return ["asked the training in this process to stop after its current step and save"]
    if not owner.hears_signals:
        raise HpctrainError(
            f"it trains in a thread of process {owner.pid}, which a signal doesn't reach: call Run.cancel() there"
        )
    # the process id may have been given to another program since
    if not owner.in_program and "hpctrain" not in owner.command:
        raise HpctrainError(
            f"process {owner.pid} should be the run's, but it is `{owner.command[:80]}`: no signal was sent"
        )
    _record_cancelled(directory, cancelled=True)
    try:
        os.kill(owner.pid, signal.SIGINT)
    except OSError as error:
        raise HpctrainError(f"process {owner.pid} can't be stopped: {error.strerror}") from error
    return [f"asked process {owner.pid} to stop after its current step and save"]

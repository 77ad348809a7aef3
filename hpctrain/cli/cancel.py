"""`python -m hpctrain cancel RUN ...`: cancel queued and running runs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from hpctrain.cli.arguments import add_runs, chosen_runs, command_parser
from hpctrain.errors import ERROR_PREFIX, ExitCode, HpctrainError, SchedulerError
from hpctrain.files import describe_os_error
from hpctrain.phrases import listed
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.run.owner import Owner
from hpctrain.scheduler.slurm import Slurm
from hpctrain.status.report import ask_slurm, job_ids, read_statuses

_EPILOG = """\
examples:
  python -m hpctrain cancel runs/digits/2026-01-31_12-00-00
  python -m hpctrain cancel sweep          # every run under runs/sweep

A queued run leaves the queue. A running run finishes its current step, saves if the time allows, and is never
requeued; `resume` continues it. In a job array, only the tasks of these runs are cancelled. A run on this machine
receives the signal that Ctrl-C sends.

Exit code 0; 1 if a queued or running run could not be cancelled; 2 if RUN is not a run."""


def main(arguments: list[str]) -> int:
    """Cancel runs; ``arguments`` are those after `cancel`."""
    description = "Cancel the queued and running jobs of runs; stop runs that were started on this machine."
    parser = command_parser("cancel", description, _EPILOG)
    add_runs(parser, nargs="+")
    options = parser.parse_args(arguments)
    failed = False
    # all runs are found first: a misspelt name must not leave half of them cancelled
    for directory in chosen_runs(options):
        try:
            done = _cancel(directory)
        except (HpctrainError, OSError) as error:
            failed = True
            why = describe_os_error(error) if isinstance(error, OSError) else error
            print(f"{ERROR_PREFIX}{os.path.relpath(directory.path)}: {why}", file=sys.stderr)
        else:
            print(f"{os.path.relpath(directory.path)}: {done}")
    return ExitCode.FAILED if failed else ExitCode.FINISHED


def _cancel(directory: RunDirectory) -> str:
    """Cancel one run, and describe what was done.

    Raises:
        HpctrainError: the run is queued or running, and can't be reached from here.
    """
    if done := [*_cancel_jobs(directory), *_stop_process(directory)]:
        return "; ".join(done)
    (status,) = read_statuses([directory])
    return f"nothing to cancel: the run is {status.state}"


def _record_cancelled(directory: RunDirectory, *, cancelled: bool) -> None:
    # SLURM's record of a job that is being preempted doesn't show who ended it, so the supervisor reads this one
    with contextlib.suppress(OSError):  # a full disk must not keep a run from being cancelled
        directory.record_job({"cancelled": cancelled, "time": time.time()})


def _cancel_jobs(directory: RunDirectory) -> list[str]:
    ids = job_ids(directory)
    jobs = ask_slurm(ids)
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
    # the process id may have been given to another program since
    if "hpctrain" not in owner.command:
        raise HpctrainError(
            f"process {owner.pid} should be the run's, but it is `{owner.command[:80]}`: no signal was sent"
        )
    _record_cancelled(directory, cancelled=True)
    try:
        os.kill(owner.pid, signal.SIGINT)
    except OSError as error:
        raise HpctrainError(f"process {owner.pid} can't be stopped: {error.strerror}") from error
    return [f"asked process {owner.pid} to stop after its current step and save"]

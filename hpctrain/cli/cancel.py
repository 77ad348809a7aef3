"""`python -m hpctrain cancel RUN ...`: end runs that wait or run."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from hpctrain.cli.jobs import ask
from hpctrain.errors import ExitCode, HpctrainError, SchedulerError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.run.owner import Owner
from hpctrain.scheduler.slurm import Slurm
from hpctrain.status.report import job_ids, read_status
from hpctrain.status.search import runs_of
from hpctrain.status.state import JobPhase

_EPILOG = """\
examples:
  python -m hpctrain cancel runs/digits/2026-01-31_12-00-00
  python -m hpctrain cancel sweep          # every run under runs/sweep

A run in the queue leaves it. A run that trains stops after the step that it is in, saves if the time allows, and is
never requeued; `resume` takes it up again. A task of a job array is cancelled alone. A run on this machine gets what
Ctrl-C would send.

Exit code 0; 1 where something that waits or runs could not be cancelled; 2 where a RUN is none."""


def main(arguments: list[str]) -> int:
    """Cancel runs; `arguments` are those after the word `cancel`."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain cancel",
        description="Cancel the queued and running jobs of runs, or stop them where they run on this machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run directory, or its name under the folder of runs")
    parser.add_argument("--runs-dir", default="runs", metavar="FOLDER", help="where names are looked up (runs)")
    options = parser.parse_args(arguments)
    # all names are looked up before anything is cancelled
    found = list(dict.fromkeys(run for typed in options.runs for run in runs_of(typed, Path(options.runs_dir))))
    failed = False
    for directory in found:
        try:
            done = _cancel(directory)
        except HpctrainError as error:
            failed = True
            print(f"hpctrain: error: {os.path.relpath(directory.path)}: {error}", file=sys.stderr)
        else:
            print(f"{os.path.relpath(directory.path)}: {done}")
    return ExitCode.FAILED if failed else ExitCode.FINISHED


def _cancel(directory: RunDirectory) -> str:
    """Cancel one run; what was done, in words.

    Raises:
        HpctrainError: it waits or runs where we can't reach it.
    """
    if done := [*_cancel_jobs(directory), *_stop_process(directory)]:
        return "; ".join(done)
    return f"nothing to cancel, it is {read_status(directory, ask(job_ids(directory))).state}"


def _note(directory: RunDirectory, *, cancelled: bool) -> None:
    """Say so before it happens: SLURM's record of a job that is preempted doesn't tell who ended it."""
    with contextlib.suppress(OSError):  # a full disk is no reason to let the run go on
        directory.record_job({"cancelled": cancelled, "time": time.time()})


def _cancel_jobs(directory: RunDirectory) -> list[str]:
    ids = job_ids(directory)
    jobs = ask(ids)
    if jobs is None:
        raise HpctrainError(
            f"SLURM can't be asked from here about job {', '.join(ids)}; type the command on a login node"
        )
    phases = {job_id: view.phase for job_id, view in jobs.items() if view is not None}
    done: list[str] = []
    for job_id in ids:
        if phases.get(job_id, JobPhase.ENDED) is JobPhase.ENDED:
            continue
        _note(directory, cancelled=True)
        try:
            Slurm().cancel(job_id)
        except SchedulerError:
            if not done:
                _note(directory, cancelled=False)
            raise
        done.append(f"cancelled job {job_id}, which was {phases[job_id]}")
    return done


def _stop_process(directory: RunDirectory) -> list[str]:
    ledger = Ledger(directory)
    number = ledger.last_claim()
    owner = Owner.read(directory.claim(number)) if number else None
    ended = any(attempt.attempt == number and not attempt.open for attempt in ledger.attempts())
    if owner is None or ended or owner.alive is False:
        return []
    if owner.alive is None:
        raise HpctrainError(f"it was started on {owner.host}, as process {owner.pid}: type the command there")
    if "hpctrain" not in owner.command:
        raise HpctrainError(
            f"process {owner.pid} should be the run's, but is `{owner.command[:80]}`: nothing was sent to it"
        )
    _note(directory, cancelled=True)
    try:
        os.kill(owner.pid, signal.SIGINT)
    except OSError as error:
        raise HpctrainError(f"process {owner.pid} can't be stopped: {error.strerror}") from error
    return [f"asked process {owner.pid} to stop after its step and save"]

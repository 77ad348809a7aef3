"""One run after another in the job of this batch script, as a search trains them."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import ERROR_PREFIX, ExitCode, HpctrainError
from hpctrain.launch.prepare import RunPlan
from hpctrain.run.directory import umask_of
from hpctrain.run.job_records import JobRecords
from hpctrain.run.ledger import Attempt
from hpctrain.run.reason import Reason
from hpctrain.scheduler.slurm import Slurm
from hpctrain.supervise.ranks import print_error
from hpctrain.supervise.signals import catch_signals, watch_signals
from hpctrain.supervise.supervisor import Supervisor

STANDARD_OUTPUT = 1
"""Its file descriptor."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The end of a run in a job that trains others as well.

    Attributes:
        exit_code: as the batch script of this run alone would return it.
        reason: why the attempt of this job ended; None if it recorded no end, or none began.
        job_ends: whether SLURM is ending the job, or has it back in its queue: then the process has to end at once, and
            what is left follows when the job comes back.
    """

    exit_code: ExitCode
    reason: Reason | None
    job_ends: bool


class JobSupervisor:
    """Runs the attempts of one run after another in this job; made once per process, in its main thread.

    It catches the signals that SLURM sends to the batch script; the caller has blocked them before its imports
    (`signals.WATCHED`), and calls `signals.ignore_signals` before the process ends. In each run, `jobs.jsonl` records
    when the job begins to work for it, and when it leaves it.

    Args:
        environ: the batch script's environment.
        slurm: queries and requeues the job; None for that of the environment.
    """

    def __init__(self, environ: Mapping[str, str], slurm: Slurm | None = None) -> None:
        self._environ = environ
        self._slurm = slurm or Slurm(environ)
        self._lost: frozenset[str] = frozenset()
        self._current: Supervisor | None = None
        watch_signals(catch_signals(), self._check)

    def run(self, plan: RunPlan) -> RunEnd:
        """Run attempts of a run until it ends, pauses, or the job ends.

        If SLURM is ending the job already, or its time is almost over, no attempt begins, and the job is requeued.

        Args:
            plan: of the run.
        """
        is_first = self._current is None
        supervisor = self._current = Supervisor(plan, self._environ, self._slurm, shares_job=True)
        supervisor.allocation.lose(self._lost)
        # a job whose time limit is shorter than the warning has to gain something each time
        if not is_first and supervisor.job.requeue_if_ending(plan.slurm.signal_delay_s):
            return RunEnd(ExitCode.INTERRUPTED, None, job_ends=True)
        try:
            return self._run(supervisor)
        except HpctrainError as error:
            print_error(f"{ERROR_PREFIX}{error}")
            return RunEnd(error.exit_code, None, job_ends=supervisor.job.requeue_if_ending())
        finally:
            # SLURM doesn't give a dead node back to the allocation
            self._lost |= supervisor.allocation.lost

    def _run(self, supervisor: Supervisor) -> RunEnd:
        job, records = supervisor.job, JobRecords(supervisor.directory)
        os.umask(umask_of(supervisor.plan.config.mode))
        with contextlib.suppress(OSError):  # the supervisor retries, and reports it
            records.begin(job.job_id, job.restarts, _own_log())
        code = ExitCode(supervisor.run())
        job_ends = supervisor.job.requeue_if_ending()
        last = _last_attempt(supervisor)
        if not job_ends or last is None or not last.may_continue:
            with contextlib.suppress(OSError):  # the end of the attempt says the same
                records.leave(job.job_id)
        return RunEnd(code, None if last is None else last.reason, job_ends=job_ends)

    def _check(self) -> None:
        # between two runs it is that of the one before, which has settled; the next one asks SLURM before it begins
        if self._current is not None:
            self._current.job.check()


def _last_attempt(supervisor: Supervisor) -> Attempt | None:
    """The run's newest attempt, if this job made it; None if another job has claimed the run, or it can't be read."""
    with contextlib.suppress(OSError, HpctrainError):
        number = supervisor.ledger.last_claim()
        last = supervisor.ledger.attempt(number)
        if number == supervisor.job.attempt or (not supervisor.job.attempt and last.job_id == supervisor.job.job_id):
            return last
    return None


def _own_log() -> Path | None:
    """The batch script's log; None if standard output isn't a file."""
    with contextlib.suppress(OSError, ValueError):
        if stat.S_ISREG(os.fstat(STANDARD_OUTPUT).st_mode):
            return Path(f"/proc/self/fd/{STANDARD_OUTPUT}").readlink()
    return None

"""One run after another in the job of this batch script, as a search trains them."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from hpctrain.errors import ERROR_PREFIX, ExitCode, HpctrainError
from hpctrain.launch.prepare import RunPlan
from hpctrain.run.directory import umask_of
from hpctrain.run.job_records import JobRecords
from hpctrain.scheduler.slurm import Slurm
from hpctrain.supervise.ranks import print_error
from hpctrain.supervise.signals import catch_signals, watch_signals
from hpctrain.supervise.supervisor import Supervisor

STANDARD_OUTPUT = 1
"""Its file descriptor."""


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

    def run(self, plan: RunPlan) -> tuple[int, bool]:
        """Run attempts of a run until it ends, pauses, or the job ends.

        If SLURM is ending the job already, or its time is almost over, no attempt begins, and the job is requeued.

        Args:
            plan: of the run.

        Returns:
            The exit code, as the batch script of this run alone would return it; and whether SLURM is ending the job,
            or has it back in its queue: then the process has to end at once, and what is left follows when the job
            comes back.
        """
        is_first = self._current is None
        supervisor = self._current = Supervisor(plan, self._environ, self._slurm, shares_job=True)
        supervisor.allocation.lose(self._lost)
        # a job whose time limit is shorter than the warning has to gain something each time
        if not is_first and supervisor.job.requeue_if_ending(plan.slurm.signal_delay_s):
            return ExitCode.INTERRUPTED, True
        try:
            return self._run(supervisor)
        except HpctrainError as error:
            print_error(f"{ERROR_PREFIX}{error}")
            return error.exit_code, supervisor.job.requeue_if_ending()
        finally:
            # SLURM doesn't give a dead node back to the allocation
            self._lost |= supervisor.allocation.lost

    def _run(self, supervisor: Supervisor) -> tuple[int, bool]:
        job, records = supervisor.job, JobRecords(supervisor.directory)
        os.umask(umask_of(supervisor.plan.config.mode))
        with contextlib.suppress(OSError):  # the supervisor retries, and reports it
            records.begin(job.job_id, job.restarts, _own_log())
        code = supervisor.run()
        job_ends = supervisor.job.requeue_if_ending()
        if not (job_ends and _may_continue(supervisor)):
            with contextlib.suppress(OSError):  # the end of the attempt says the same
                records.leave(job.job_id)
        return code, job_ends

    def _check(self) -> None:
        # between two runs it is that of the one before, which has settled; the next one asks SLURM before it begins
        if self._current is not None:
            self._current.job.check()


def _may_continue(supervisor: Supervisor) -> bool:
    """Whether the run's newest attempt is this job's, and may be followed by another one; False if it can't be read."""
    job = supervisor.job
    with contextlib.suppress(OSError, HpctrainError):
        last = supervisor.ledger.attempt(supervisor.ledger.last_claim())
        is_own = last.attempt == job.attempt or (not job.attempt and last.job_id == job.job_id)
        return is_own and last.may_continue
    return False


def _own_log() -> Path | None:
    """The batch script's log; None if standard output isn't a file."""
    with contextlib.suppress(OSError, ValueError):
        if stat.S_ISREG(os.fstat(STANDARD_OUTPUT).st_mode):
            return Path(f"/proc/self/fd/{STANDARD_OUTPUT}").readlink()
    return None

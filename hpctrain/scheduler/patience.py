"""Questions to a controller that is silent for a while: its machine is changed, or it has too much to do."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from hpctrain.errors import SchedulerError, SchedulerMissingError
from hpctrain.scheduler.job import JobRecord
from hpctrain.scheduler.slurm import Slurm

PATIENCE_S = 300.0
"""A controller that fails over is silent for `SlurmctldTimeout`, by default 120 s, and a little more."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0

T = TypeVar("T")

log = logging.getLogger("hpctrain.scheduler")


def patiently(ask: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """What `ask` returns, asked anew while SLURM doesn't answer.

    Args:
        ask: may be called often.
        patience_s: how long in all, in seconds; whoever has less time is killed meanwhile.

    Raises:
        SchedulerMissingError: SLURM was silent to the end, or its commands aren't installed: no use to wait for those.
        SchedulerError: it refuses.
    """
    deadline, pause_s = time.monotonic() + patience_s, FIRST_PAUSE_S
    while True:
        try:
            return ask()
        except SchedulerMissingError as error:
            left_s = deadline - time.monotonic()
            if isinstance(error.__cause__, OSError) or left_s <= 0:
                raise
            log.warning("SLURM is silent, and is asked again for %.0f s: %s", left_s, error)
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def show(slurm: Slurm, job_id: str, patience_s: float = PATIENCE_S) -> JobRecord | None:
    """The job's record, as `Slurm.show`; None also where SLURM stays silent, which is logged.

    Args:
        slurm: who is asked.
        job_id: of the job.
        patience_s: how long in all, in seconds.
    """
    try:
        return patiently(lambda: slurm.show(job_id), patience_s)
    except SchedulerError as error:
        log.info("SLURM could not be asked about job %s: %s", job_id, error)
        return None


def requeue(slurm: Slurm, job_id: str, *, restarts: int, patience_s: float = PATIENCE_S) -> None:
    """Put a job back into the queue, as `Slurm.requeue`; nothing happens where SLURM has done it already.

    Args:
        slurm: who is asked.
        job_id: of the job.
        restarts: how often it had been requeued when this attempt began.
        patience_s: how long SLURM may be silent, in seconds.

    Raises:
        SchedulerError: the job can't be requeued.
    """

    def ask() -> None:
        try:
            slurm.requeue(job_id)
        except SchedulerMissingError:
            raise
        except SchedulerError:
            record = slurm.show(job_id)
            if record is None or not (record.state.is_pending or (record.restarts or 0) > restarts):
                raise
            log.info("SLURM has requeued job %s already", job_id)

    patiently(ask, patience_s)

"""A drill's training on a SLURM cluster."""

from __future__ import annotations

import time

from hpctrain.drill.training import Training
from hpctrain.errors import SchedulerError
from hpctrain.run.ledger import Ledger
from hpctrain.scheduler.slurm import Slurm
from hpctrain.status.report import job_ids

ASK_EVERY_S = 1.0
"""Seconds between two questions to SLURM."""


class SlurmTraining(Training):
    """Submitted; interrupted by `scontrol requeue`, after which it goes on by itself."""

    poll_s = 0.05
    settle_s = 15.0

    def begin(self) -> None:
        """See `Training`."""
        self._slurm, self._asked_at, self._finished = Slurm(), float("-inf"), False
        code = self.run(*self.command).wait()
        if code:
            self.refuse(code)

    def over(self, attempt: int) -> bool:
        """See `Training`: the next one began, or the job is finished and none will."""
        if Ledger(self.directory).last_claim() > attempt:
            return True
        now = time.monotonic()
        if now - self._asked_at >= ASK_EVERY_S:
            self._asked_at = now
            self._finished = self._job_is_finished()
        return self._finished

    def interrupt(self, number: int) -> str:  # noqa: ARG002 - SLURM chooses the signal
        """See `Training`."""
        self._slurm.requeue(self.job_id)
        return "scontrol requeue"

    def go_on(self) -> None:
        """See `Training`: SLURM has put the job back into the queue."""

    def abandon(self) -> None:
        """See `Training`."""
        self._slurm.cancel(self.job_id)

    @property
    def job_id(self) -> str:
        """The newest job of the run."""
        return job_ids(self.directory)[-1]

    def _job_is_finished(self) -> bool:
        try:
            record = self._slurm.find([self.job_id])[self.job_id]
        except SchedulerError:
            return False  # a busy controller; asked again
        return record is None or record.state.is_finished

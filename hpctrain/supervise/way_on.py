"""The ways out of an allocation on which a run goes on: the same job, back in the queue, or a new job."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field, replace

from hpctrain.attempt.termination import Cause, diagnose
from hpctrain.config.cluster import Slurm as SlurmCluster
from hpctrain.config.resources import resources_of
from hpctrain.config.root import Config
from hpctrain.errors import SchedulerError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.scheduler.patience import requeue, show
from hpctrain.scheduler.slurm import Slurm

log = logging.getLogger("hpctrain.launch")


@dataclass
class WayOn:
    """What is asked of SLURM for the run, once this allocation is given up.

    Attributes:
        directory: the run.
        config: its configuration.
        slurm: who is asked.
        job_id: of this allocation; None outside of one.
        restarts: how often the job had been requeued when this allocation began.
        requeued: SLURM has agreed to put the job back into the queue.
        cancelled: the user has cancelled it: nothing goes on.
    """

    directory: RunDirectory
    config: Config
    slurm: Slurm
    job_id: str | None
    restarts: int
    requeued: bool = False
    cancelled: bool = False
    _decided: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def requeue(self, silence_s: float) -> bool:
        """Put the job back into the queue, once, whichever thread asks first.

        Args:
            silence_s: how long SLURM may leave that without an answer.

        Returns:
            Whether it is there.
        """
        with self._lock:
            return self._requeue(silence_s)

    def requeue_early(self, silence_s: float) -> bool:
        """The same for a job that is being killed; not once it is decided how the run goes on, or that it doesn't.

        Args:
            silence_s: how long SLURM may leave that without an answer.

        Returns:
            Whether there is nothing left to ask for.
        """
        with self._lock:
            return self._decided or self._requeue(silence_s)

    def cancel(self) -> None:
        """Note that the user has cancelled the job: it isn't requeued, and no new one is submitted."""
        self.cancelled = True

    def decided(self) -> bool:
        """Note that the run's way on is decided; whether the job was put back into the queue before."""
        with self._lock:
            self._decided = True
            return self.requeued

    def _requeue(self, silence_s: float) -> bool:
        assert self.job_id is not None
        if self.cancelled:
            return False
        if not self.requeued:
            try:
                requeue(self.slurm, self.job_id, restarts=self.restarts, patience_s=silence_s)
            except SchedulerError as error:
                log.info("job %s can't be requeued: %s", self.job_id, error)
                return False
            self.requeued = True
            log.info("job %s is requeued", self.job_id)
        return True

    def requeue_for_its_files(self, budget: int, silence_s: float) -> bool:
        """Put a job whose run directory can't be written back into the queue: it may find it mended, or other nodes.

        No ledger can count such requeues, so SLURM's own count bounds them; and nobody has asked yet whether the user
        cancelled the job meanwhile.

        Args:
            budget: requeues that nothing in the ledger accounts for, after which it is given up.
            silence_s: how long SLURM may leave a question without an answer.

        Returns:
            Whether it is there.
        """
        if self.job_id is None or self._fruitless_requeues() >= budget or self._cancelled(silence_s):
            return False
        return self.requeue(silence_s)

    def _fruitless_requeues(self) -> int:
        try:
            attempts = Ledger(self.directory).attempts()
        except OSError:
            return self.restarts
        told = [one.extra for one in attempts if one.job_id in (None, self.job_id) and "requeued_by" in one.extra]
        return self.restarts - len([extra for extra in told if extra.get("next") != "restart"])

    def _cancelled(self, silence_s: float) -> bool:
        assert self.job_id is not None
        record = show(self.slurm, self.job_id, silence_s)
        return diagnose(None, record, restarts=self.restarts, now=time.time()).cause is Cause.CANCELLED

    def resubmit(self, exclude: tuple[str, ...]) -> str:
        """Submit a new job that keeps away from these nodes, and from those that earlier attempts excluded.

        Returns:
            Its id.

        Raises:
            HpctrainError: SLURM doesn't take it.
        """
        from hpctrain.launch.prepare import RunPlan
        from hpctrain.launch.submission import submit

        cluster = self.config.cluster
        assert isinstance(cluster, SlurmCluster)
        earlier = [node for attempt in Ledger(self.directory).attempts() for node in attempt.extra.get("exclude", ())]
        nodes = ",".join(filter(None, dict.fromkeys((cluster.exclude, *earlier, *exclude))))
        config = replace(self.config, cluster=replace(cluster, exclude=nodes or None))
        (job_id,) = submit([RunPlan(config, self.directory, resources_of(config))], self.directory)
        return job_id

"""The end of an attempt whose ranks were started by hand, with srun or torchrun: no launcher records it."""

from __future__ import annotations

import logging

from hpctrain.attempt.outcome import Outcome, record_end
from hpctrain.attempt.termination import ask_slurm
from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.errors import SchedulerError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.scheduler.slurm import Slurm

ASK_TIMEOUT_S = 5.0
"""Seconds to wait for SLURM's answer: this rank may be killed soon."""

log = logging.getLogger("hpctrain.train")


def record_own_end(directory: RunDirectory, attempt: int, outcome: Outcome, environment: ClusterEnvironment) -> None:
    """Record the end of the attempt as this rank saw it; the first rank's record counts.

    Nothing is restarted or requeued: that takes a supervisor, which outlives the ranks.
    """
    # after a second Ctrl-C the outcome has its report already
    in_doubt = outcome.reason is Reason.FAILED or (outcome.reason is Reason.INTERRUPTED and not outcome.report)
    if environment.job_id is not None and in_doubt and outcome.may_be_slurms_doing(Ledger(directory), attempt):
        slurm, restarts = Slurm(timeout_s=ASK_TIMEOUT_S), environment.restart_count
        try:
            termination = ask_slurm(slurm, environment.job_id, outcome.stop_signal, restarts=restarts)
        except SchedulerError as error:
            log.info("can't query SLURM about why the ranks were stopped: %s", error)
        else:
            outcome = outcome.explained_by(termination)
    record_end(
        directory,
        attempt,
        outcome,
        world_size=environment.world_size,
        job_id=environment.job_id,
        nodes=environment.nodes,
        ends_run=True,
    )

"""Variables that the supervisor sets for the ranks of a program, because a rank can't find them out by itself."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping

from hpctrain.cluster.environment import derived_ports
from hpctrain.cluster.slurm_step import SlurmJob
from hpctrain.cluster.variables import Variables
from hpctrain.errors import SchedulerError
from hpctrain.launch.prepare import RunPlan
from hpctrain.scheduler.slurm import Slurm

log = logging.getLogger("hpctrain.supervise")


def program_variables(
    plan: RunPlan, environ: Mapping[str, str], slurm: Slurm, job_id: str, in_allocation: int
) -> dict[str, str]:
    """Return `MASTER_PORT`, and `HPCTRAIN_DEADLINE` if SLURM answers.

    Args:
        plan: of the run.
        environ: the batch script's environment.
        slurm: is asked once, since the ranks wait for the answer.
        job_id: as users type it.
        in_allocation: attempts in this allocation, the new one included.
    """
    port = plan.config.cluster.master_port
    found = {"MASTER_PORT": str(_free_port(environ, in_allocation) if port is None else port)}
    try:
        record = slurm.show(job_id)
    except SchedulerError as error:
        log.info("HPCTRAIN_DEADLINE isn't set, because SLURM doesn't answer: %s", error)
    else:
        if record is not None and record.end_time is not None:
            found["HPCTRAIN_DEADLINE"] = str(record.end_time)
    return found


def _free_port(environ: Mapping[str, str], in_allocation: int) -> int:
    """Return the first derived port that can be bound on this node, which usually is rank zero's."""
    job = SlurmJob.read(Variables(environ))
    candidates = derived_ports(job=job.number, step=in_allocation, restart=job.restart_count)
    return next(filter(_can_be_bound, candidates), candidates[0])


def _can_be_bound(port: int) -> bool:
    with socket.socket() as probe:
        # as the rendezvous of a program does: connections of an earlier attempt may still be closing
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True

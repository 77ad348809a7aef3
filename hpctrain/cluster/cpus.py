"""CPU cores and threads of one rank."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpctrain.cluster.environment import ClusterEnvironment, Source
from hpctrain.cluster.variables import Variables

_ALLOCATED = ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE")


def cpu_threads(
    environment: ClusterEnvironment, cpus_per_process: int | None, variables: Mapping[str, str]
) -> int | None:
    """Number of threads for one rank's operations; None keeps torch's default.

    The user's OMP_NUM_THREADS comes first, then the rank's cores (`cpu_cores`), unless it has all of this machine's.
    """
    if "OMP_NUM_THREADS" in variables:
        return None
    allocated = environment.source is Source.SLURM and bool({*variables} & set(_ALLOCATED))
    if cpus_per_process is None and not allocated and environment.local_world_size == 1:
        return None
    # more threads than cores slow a rank down: they spin while they wait
    return cpu_cores(environment, cpus_per_process, variables)


def cpu_cores(environment: ClusterEnvironment, cpus_per_process: int | None, variables: Mapping[str, str]) -> int:
    """Cores of one rank: the configured number, else its share of the allocated cores or of the machine's."""
    if cpus_per_process is not None:
        return cpus_per_process
    if environment.source is Source.SLURM:
        # a form that a newer SLURM may have given them is no reason to fail
        per_task, on_node = map(Variables(variables).number, _ALLOCATED)
        if per_task:
            return per_task
        if on_node:
            return max(1, on_node // environment.local_world_size)
    return max(1, len(os.sched_getaffinity(0)) // environment.local_world_size)

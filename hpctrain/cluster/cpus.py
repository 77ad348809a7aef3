"""CPU cores and threads of one rank."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpctrain.cluster.environment import ClusterEnvironment


def cpu_threads(
    environment: ClusterEnvironment, cpus_per_process: int | None, variables: Mapping[str, str]
) -> int | None:
    """Number of threads for one rank's operations; None keeps torch's default.

    The user's OMP_NUM_THREADS comes first, then the rank's cores (`cpu_cores`), unless it has all of this machine's.
    """
    if "OMP_NUM_THREADS" in variables:
        return None
    if cpus_per_process is None and environment.cpus is None and environment.local_world_size == 1:
        return None
    # more threads than cores slow a rank down: they spin while they wait
    return cpu_cores(environment, cpus_per_process)


def cpu_cores(environment: ClusterEnvironment, cpus_per_process: int | None) -> int:
    """Cores of one rank: the configured number, else its share of the allocated cores or of the machine's."""
    if cpus_per_process is not None:
        return cpus_per_process
    if environment.cpus is not None:
        return environment.cpus
    return max(1, len(os.sched_getaffinity(0)) // environment.local_world_size)

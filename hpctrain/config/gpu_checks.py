"""Check that every rank of a node has GPUs of its own, which NCCL requires."""

from __future__ import annotations

from hpctrain.config.resources import Resources
from hpctrain.config.root import Config
from hpctrain.errors import ConfigError
from hpctrain.phrases import counted


def require_gpu_for_each_rank(config: Config, resources: Resources) -> None:
    """Refuse more ranks than GPUs on a node, unless gloo connects them.

    Raises:
        ConfigError: NCCL would find two ranks on one GPU.
    """
    processes, gpus = resources.processes_per_node, resources.gpus_per_node
    if not gpus or processes == 1 or config.parallel.backend == "gloo":
        return
    each = config.cluster.gpus_per_process
    if processes * each <= gpus:
        return
    problem = (
        f"{processes} processes with {counted(each, 'GPU')} each need {processes * each} GPUs per node, but a node has "
        f"{gpus}, and with NCCL no two ranks may share a GPU"
    )
    fitting = gpus // each
    remedy = f"set it to {fitting}, or add parallel.backend=gloo" if fitting else "set cluster.gpus_per_process=1"
    raise ConfigError("cluster.processes_per_node", processes, problem, remedy)

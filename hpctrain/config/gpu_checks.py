"""Check that every rank of a node has GPUs of its own, which NCCL requires."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.config.resources import Resources
from hpctrain.config.root import Config
from hpctrain.errors import ConfigError
from hpctrain.phrases import counted

SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
"""The variable by which newer versions of NCCL let ranks share a GPU."""


def require_gpu_for_each_rank(config: Config, resources: Resources, environ: Mapping[str, str]) -> None:
    """Refuse more ranks than GPUs on a node, unless gloo connects them.

    Args:
        config: of a training.
        resources: that it requests.
        environ: of this process.

    Raises:
        ConfigError: NCCL would find two ranks on one GPU.
    """
    processes, gpus = resources.processes_per_node, resources.gpus_per_node
    if not gpus or processes == 1 or config.parallel.backend == "gloo":
        return
    if {**environ, **config.cluster.env}.get(SHARING):
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

"""The variables in which users of some sites keep their defaults for sbatch, such as SBATCH_ACCOUNT."""

from __future__ import annotations

from collections.abc import Mapping

from omegaconf import DictConfig

SBATCH_VARIABLES = {
    "account": "SBATCH_ACCOUNT",
    "partition": "SBATCH_PARTITION",
    "qos": "SBATCH_QOS",
    "reservation": "SBATCH_RESERVATION",
}
"""Keys of cluster=slurm, and the variables that stand for them."""


def fill_in(cluster: DictConfig, environ: Mapping[str, str]) -> None:
    """Give the keys of a SLURM cluster that are null the values of the user's variables.

    sbatch doesn't get the variables themselves: there they would win over the batch script, and so over the keys (see
    INPUT ENVIRONMENT VARIABLES in sbatch(1)). Inside an allocation they may be meant for another job, and don't count.

    Args:
        cluster: the group, changed in place; nothing happens to another cluster.
        environ: such as `os.environ`.
    """
    if cluster.get("kind") != "slurm" or environ.get("SLURM_JOB_ID"):
        return
    for key, variable in SBATCH_VARIABLES.items():
        if cluster.get(key) is None and environ.get(variable, "").strip():
            cluster[key] = environ[variable].strip()

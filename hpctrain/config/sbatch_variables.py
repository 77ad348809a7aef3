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
"""Keys of cluster=slurm, and the variables that are used where a key is null."""


def fill_from_sbatch_variables(cluster: DictConfig, environ: Mapping[str, str]) -> None:
    """Give the keys of a SLURM cluster that are null the values of the user's variables.

    sbatch doesn't get the variables themselves: there they would win over the batch script, and so over the keys (see
    INPUT ENVIRONMENT VARIABLES in sbatch(1)).

    Args:
        cluster: the group, changed in place; a cluster without these keys stays as it is.
        environ: such as `os.environ`.
    """
    for key, variable in SBATCH_VARIABLES.items():
        if key in cluster and cluster[key] is None and environ.get(variable, "").strip():
            cluster[key] = environ[variable].strip()

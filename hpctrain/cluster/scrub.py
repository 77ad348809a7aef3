"""The environment for a program that is launched from inside an allocation, without the allocation's own variables."""

from __future__ import annotations

from collections.abc import Mapping

_PREFIXES = (
    "SLURM",  # SLURMD_NODENAME and SLURMD_ARGS belong to the node, and the rest to the job
    "SBATCH_",
    "SRUN_",
    "SALLOC_",
    "PMI",
    "PRTE_",
    "OMPI_",
    "ORTE_",
    "MV2_COMM_WORLD_",
    "MVP_COMM_WORLD_",
    "MPISPAWN_",
    "JSM_",
    "PALS_",
    "TORCHELASTIC_",
    "SUBMITIT_",
)
_NAMES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "ROLE_NAME",
        "NODE_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        "FLUX_TASK_RANK",
        "FLUX_TASK_LOCAL_ID",
        "FLUX_JOB_SIZE",
        "FLUX_JOB_NNODES",
        "ALPS_APP_PE",
        "MPT_LRANK",
        "MP_CHILD",
    }
)
_KEPT = frozenset(
    {
        "SLURM_CONF",  # without it, the commands may not find the controller
        "SLURM_JWT",  # without it, a site that uses tokens rejects the commands
    }
)


def scrubbed(variables: Mapping[str, str]) -> dict[str, str]:
    """`variables` without those that SLURM, submitit, torchrun and MPI launchers set for the processes of a job.

    A user's own defaults, such as `SBATCH_ACCOUNT`, are removed as well: `config.sbatch_variables` has read them.
    """
    # sbatch and srun take many of these as options, so they would reach the new job
    return {
        name: value
        for name, value in variables.items()
        if name in _KEPT or not (name in _NAMES or name.startswith(_PREFIXES))
    }

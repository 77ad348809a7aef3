"""Launchers whose environment variables are too few to place every rank: refuse them."""

from __future__ import annotations

from hpctrain.cluster.variables import Variables

EXPORTED = "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
MARKS = {
    "PMIX_RANK": "a PMIx launcher",
    "PMI_RANK": "an MPI launcher",
    "MVP_COMM_WORLD_LOCAL_RANK": "MVAPICH",
    "MPISPAWN_GLOBAL_NPROCS": "MVAPICH",
    "ALPS_APP_PE": "aprun",
    "MPT_LRANK": "HPE MPT",
    "MP_CHILD": "IBM's poe",
}
"""Name of the launcher, by a variable that it sets in every process."""
SIZES = ("PMI_SIZE", "FLUX_JOB_SIZE", "MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE")
"""Variables with the number of processes; 1 means that this process is the only one."""


def refuse(variables: Variables) -> None:
    """Raise if such a launcher started this process, unless this is its only process.

    Inside an srun step, or a shell of one, SLURM's MPI plugins set some of these variables. They don't count there: the
    caller handles steps itself.

    Raises:
        ClusterEnvironmentError: names the variables to export, or to unset.
    """
    if variables.text("SLURM_STEP_ID") is not None:
        return
    marks = [name for name in MARKS if variables.text(name) is not None and not _is_alone(variables, name)]
    if not marks:
        return
    raise variables.error(
        "expected srun, torchrun, or the launcher of Open MPI, MPICH, Intel MPI, MVAPICH2, LSF (jsrun), Flux or PALS, "
        f"but {MARKS[marks[0]]} started this process, and its environment variables don't give each rank its place; "
        f"use one of those, export {EXPORTED}, or unset {' '.join(marks)} to train in a single process",
        *marks,
        *(name for name in SIZES if variables.text(name) is not None),
    )


def _is_alone(variables: Variables, mark: str) -> bool:
    if mark == "PMIX_RANK" and (variables.text("PMIX_NAMESPACE") or "").startswith("singleton"):
        return True  # a process that called MPI_Init without a launcher, or one that it started
    return any(variables.number(name) == 1 for name in SIZES)

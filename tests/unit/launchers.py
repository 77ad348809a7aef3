"""Environment variables as the launchers of ranks set them, and the place that follows."""

from __future__ import annotations

from hpctrain.cluster.environment import ClusterEnvironment

derive = ClusterEnvironment.from_environment

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_NTASKS": "5",
}
BATCH = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"}
INTERACTIVE = BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}
PTY = STEP | {"SLURM_PTY_PORT": "4711"}
TORCH = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29400",
}
ELASTIC = TORCH | {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "OMPI_COMM_WORLD_NODE_RANK": "2",
    "MASTER_ADDR": "n1",
}
FLUX = {
    "FLUX_TASK_RANK": "5",
    "FLUX_JOB_SIZE": "6",
    "FLUX_TASK_LOCAL_ID": "2",
    "FLUX_JOB_NNODES": "2",
    "MASTER_ADDR": "n1",
}
PALS = {
    "PALS_RANKID": "5",
    "PMI_SIZE": "6",
    "PALS_LOCAL_RANKID": "2",
    "PALS_LOCAL_SIZE": "3",
    "MASTER_ADDR": "n1",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "5",
    "MV2_COMM_WORLD_SIZE": "6",
    "MV2_COMM_WORLD_LOCAL_RANK": "2",
    "MV2_COMM_WORLD_LOCAL_SIZE": "3",
    "MASTER_ADDR": "n1",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "5",
    "JSM_NAMESPACE_SIZE": "6",
    "JSM_NAMESPACE_LOCAL_RANK": "2",
    "JSM_NAMESPACE_LOCAL_SIZE": "3",
    "MASTER_ADDR": "n1",
}
# as mpiexec of MPICH 4.3 sets them
HYDRA = {
    "PMI_RANK": "5",
    "PMI_SIZE": "6",
    "MPI_LOCALRANKID": "2",
    "MPI_LOCALNRANKS": "3",
    "PMI_FD": "9",
    "MASTER_ADDR": "n1",
}


def place(environment: ClusterEnvironment) -> tuple[int, ...]:
    """Rank, local rank, node rank; world size, local world size, nodes."""
    ranks = (environment.rank, environment.local_rank, environment.node_rank)
    return (*ranks, environment.world_size, environment.local_world_size, environment.num_nodes)

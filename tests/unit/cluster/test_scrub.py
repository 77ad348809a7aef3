from hpctrain.cluster import mpi, unknown_launcher
from hpctrain.cluster.scrub import scrubbed


def test_only_the_allocation_and_the_launchers_go() -> None:
    kept = {
        "PATH": "/bin",
        "HOME": "/root",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_JWT": "token",
        "NCCL_SOCKET_IFNAME": "ib0",
        "TORCH_HOME": "/cache",
        "OMP_NUM_THREADS": "4",
        "RANKING": "x",
        "SQUEUE_FORMAT": "%i",
    }
    dropped = [
        *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_CPUS_PER_TASK", "SLURMD_NODENAME"),
        *("SBATCH_PARTITION", "SRUN_CPUS_PER_TASK", "SALLOC_QOS"),
        *("PMI_RANK", "PMI2_X", "PMIX_NAMESPACE", "OMPI_COMM_WORLD_RANK", "OMPI_MCA_x"),
        *("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "SUBMITIT_EXECUTOR", "SUBMITIT_LOCAL_GLOBALID"),
    ]
    assert scrubbed(kept | dict.fromkeys(dropped, "1")) == kept


def test_the_given_mapping_is_left_alone() -> None:
    variables = {"SLURM_JOB_ID": "1"}
    assert scrubbed(variables) == {}
    assert variables == {"SLURM_JOB_ID": "1"}


def test_no_launcher_is_seen_by_a_program_that_is_launched_from_its_ranks() -> None:
    names = {name for launcher in mpi.LAUNCHERS for name in launcher.variables} | {
        *unknown_launcher.MARKS,
        *unknown_launcher.SIZES,
    }
    assert scrubbed(dict.fromkeys(names, "2")) == {}

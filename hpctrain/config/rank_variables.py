"""Environment variables that the configuration sets for the ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpctrain.config import require
from hpctrain.errors import ConfigError

BY_LAUNCHER = "remove it: the launcher sets it"
OWN_VARIABLES = {
    "MASTER_PORT": "set cluster.master_port",
    "MASTER_ADDR": "set parallel.init_method=tcp://HOST:PORT",
    r"(GROUP_|ROLE_|LOCAL_)?(RANK|WORLD_SIZE)|NODE_RANK|ROLE_NAME": "remove it: each rank has its own",
    "HPCTRAIN_(CLAIM|LOGGED|STORE|PARENT|TERMINAL|CODE|VERSION)": "remove it: each attempt has its own",
    "HPCTRAIN_(ATTEMPT|RUN_DIR|CHECKPOINT_DIR|SUBMIT_DIR|SESSION|DEADLINE|STOP_SIGNAL)": "remove it: programs get it",
    r"(SLURM|SLURMD|SBATCH|SRUN|SALLOC)_\w+": "use cluster.srun_args or cluster.sbatch for options of SLURM",
    r"(TORCHELASTIC|SUBMITIT|PMI2?|JSM|PALS|MPISPAWN|OMPI_COMM_WORLD|(MV2|MVP)_COMM_WORLD)_\w+": BY_LAUNCHER,
    r"PMIX_(RANK|NAMESPACE)|MPI_LOCAL(RANKID|NRANKS)|FLUX_(TASK_RANK|TASK_LOCAL_ID|JOB_SIZE|JOB_NNODES)": BY_LAUNCHER,
}
"""Patterns of variables that hpctrain, SLURM or another launcher sets for each rank, and what to do instead."""


def check_variables(key: str, variables: Mapping[str, object]) -> None:
    """Refuse names that aren't variable names or that hpctrain sets, and values that aren't single lines.

    Raises:
        ConfigError: the first such variable.
    """
    for name, value in variables.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"{key}.{name}", value, "is not a variable name", "use letters, digits and _")
        if not isinstance(value, str):
            raise ConfigError(f"{key}.{name}", value, "is not a string", f"write {key}.{name}=VALUE")
        if name == "HPCTRAIN_SECRET":
            problem = "would be in config.yaml, which others may read"
            raise ConfigError(f"{key}.{name}", "***", problem, "export it where you start the ranks")
        for pattern, remedy in OWN_VARIABLES.items():
            if re.fullmatch(pattern, name):
                raise ConfigError(f"{key}.{name}", value, "is set by hpctrain or the launcher", remedy)
        require.single_line(f"{key}.{name}", value)

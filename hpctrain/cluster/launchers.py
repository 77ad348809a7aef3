"""The launchers other than srun: torchrun, those of MPI, jsrun and Flux, and the place of a rank that one started.

MPI itself isn't used. hpctrain's local launcher sets torchrun's variables as well.

Sources: torch.distributed.elastic.agent, `LocalElasticAgent._start_workers`; Open MPI's manual, "Environment variables
set for MPI applications"; MVAPICH2's user guide, "Run using mpirun_rsh", and src/common/src/env/mv2_env_params.c of
MVAPICH 3; MPICH's src/pm/hydra, which Intel MPI's mpirun is derived from; OLCF's Summit user guide, "jsrun";
flux-environment(7), and t/t2607-job-shell-env.t of flux-core for what an initial program doesn't see; HPE's mpiexec(1)
of PALS and ALCF's pages on Aurora and Polaris.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from hpctrain.cluster.slurm_step import has_one_task_per_node, has_step_id, in_step, job_nodes
from hpctrain.cluster.variables import Place, Variables, is_loopback

TORCHRUN_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
TORCHRUN_VARIABLES = (*TORCHRUN_PLACE, "MASTER_ADDR", "MASTER_PORT")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Names of the environment variables by which one launcher places its ranks.

    Attributes:
        name: as `Source` has it.
        local_size: ranks on this node; None if only the number of nodes is known.
        num_nodes: the number of nodes; None if only the ranks on this node are known.
        address_option: how to pass rank zero's address to every rank, for error messages.
        needs_all: whether all variables must be set to recognise it, since other launchers set the first two as well.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str | None = None
    num_nodes: str | None = None
    address_option: str
    needs_all: bool = False

    @classmethod
    def with_prefix(cls, name: str, prefix: str, address_option: str) -> Launcher:
        """Return a launcher whose variables have one prefix, and the usual names after it."""
        rank, size = f"{prefix}_RANK", f"{prefix}_SIZE"
        local_rank, local_size = f"{prefix}_LOCAL_RANK", f"{prefix}_LOCAL_SIZE"
        return cls(
            name=name, rank=rank, size=size, local_rank=local_rank, local_size=local_size, address_option=address_option
        )

    @property
    def variables(self) -> tuple[str, ...]:
        """All variables that a place needs."""
        names = (self.rank, self.size, self.local_rank, self.local_size, self.num_nodes)
        return tuple(name for name in names if name is not None)


OPENMPI = Launcher.with_prefix("openmpi", "OMPI_COMM_WORLD", "pass mpirun -x MASTER_ADDR=HOST")
PALS = Launcher(
    name="pals",
    rank="PALS_RANKID",
    size="PMI_SIZE",  # PALS has no number of ranks of its own
    local_rank="PALS_LOCAL_RANKID",
    local_size="PALS_LOCAL_SIZE",
    address_option="pass mpiexec --env MASTER_ADDR=HOST",
)
LAUNCHERS = (
    OPENMPI,
    # before PALS: its plugin for Cray's PMI sets the variables of PALS as well
    Launcher(
        name="flux",
        rank="FLUX_TASK_RANK",
        size="FLUX_JOB_SIZE",
        local_rank="FLUX_TASK_LOCAL_ID",
        num_nodes="FLUX_JOB_NNODES",
        address_option="pass flux run --env=MASTER_ADDR=HOST",
    ),
    PALS,
    Launcher.with_prefix("mvapich", "MV2_COMM_WORLD", "pass mpirun_rsh MASTER_ADDR=HOST"),  # MVAPICH2
    Launcher.with_prefix("mvapich", "MVP_COMM_WORLD", "pass mpirun_rsh MASTER_ADDR=HOST"),  # MVAPICH from 3.0 on
    Launcher.with_prefix("jsrun", "JSM_NAMESPACE", "pass jsrun -E MASTER_ADDR=HOST"),
    # MPICH, Intel MPI and MVAPICH 4; the first two variables are also those of `srun --mpi=pmi2`
    Launcher(
        name="hydra",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        address_option="pass mpiexec -genv MASTER_ADDR HOST",
        needs_all=True,
    ),
)
"""The launchers but srun and torchrun; where several started one another, the innermost comes first.

A new one also needs a member of `environment.Source` with its name, its variable in `SIZES`, its variables in
`hpctrain.cluster.variables` and in `OWN_VARIABLES` of `hpctrain.config.require`, and, for `run -- COMMAND`, its name in
`_OF_A_JOB` or `_OF_A_NODE` of `hpctrain.config.command`."""


def has_torchrun_place(variables: Variables) -> bool:
    """Whether the variables of torch's `env://` protocol and the local rank are all set."""
    return all(variables.text(name) is not None for name in TORCHRUN_VARIABLES)


def refuse_partial(variables: Variables) -> None:
    """Raise if only some of a rank's variables are set."""
    names = [name for name in TORCHRUN_PLACE if variables.text(name) is not None]
    if names:
        missing = [name for name in TORCHRUN_VARIABLES if variables.text(name) is None]
        raise variables.error(
            f"expected {', '.join(missing)} in addition to {', '.join(names)}; unset {' '.join(names)} "
            "to run as a single process, or start the ranks with srun or torchrun",
            *names,
        )


def refuse_contradiction(variables: Variables, rank: str, world_size: str, local_rank: str) -> None:
    """Raise if torchrun's variables are set as well and contradict the named ones."""
    variables.require_equal("RANK", rank)
    variables.require_equal("WORLD_SIZE", world_size)
    variables.require_equal("LOCAL_RANK", local_rank)


def torchrun_place(variables: Variables) -> Place:
    """Derive the place of a process that torchrun, or a launcher of its kind, started.

    Raises:
        ClusterEnvironmentError: variables are missing or contradict each other.
    """
    if not has_torchrun_place(variables):
        refuse_partial(variables)
    because = "TORCHELASTIC_RUN_ID"
    rank, world_size = variables.needed_number("RANK", because), variables.needed_number("WORLD_SIZE", because)
    local_rank = variables.needed_number("LOCAL_RANK", because)
    local_world_size = _local_world_size(variables, world_size)
    variables.require_below("RANK", "WORLD_SIZE")
    variables.require_below("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    variables.require_below("GROUP_RANK", "GROUP_WORLD_SIZE")
    if local_world_size > world_size or local_rank > rank:
        raise variables.error(
            "expected LOCAL_WORLD_SIZE of at most WORLD_SIZE, and LOCAL_RANK of at most RANK; "
            "unset the ones that another launcher exported",
            *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        )
    # GROUP_* are torchrun's own: other launchers with its variables may leave them out
    num_nodes = variables.number("GROUP_WORLD_SIZE") or -(-world_size // local_world_size)
    node_rank = variables.number("GROUP_RANK")
    nodes = job_nodes(variables)
    return Place(
        rank=rank,
        local_rank=local_rank,
        node_rank=rank // local_world_size if node_rank is None else node_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        num_nodes=num_nodes,
        master_addr=variables.needed_text("MASTER_ADDR", because),
        nodes=nodes if len(nodes) == num_nodes else (),
    )


def _local_world_size(variables: Variables, world_size: int) -> int:
    exported_size = variables.number("LOCAL_WORLD_SIZE")
    if exported_size:
        return exported_size
    # without LOCAL_WORLD_SIZE, the launcher is trusted only on a single node
    if variables.number("RANK") == variables.number("LOCAL_RANK") and is_loopback(
        variables.needed_text("MASTER_ADDR", "RANK")
    ):
        return world_size
    problem = "expected LOCAL_WORLD_SIZE to be the number of ranks on this node, in addition to WORLD_SIZE; set it"
    raise variables.error(problem, "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


def launcher_of(variables: Variables) -> Launcher | None:
    """Return the launcher that started this process as one of several ranks; None if there is none.

    A single process of another launcher than Open MPI may be an interactive shell, which launches its own ranks.
    """
    return next((launcher for launcher in LAUNCHERS if _started(variables, launcher)), None)


def _started(variables: Variables, launcher: Launcher) -> bool:
    if launcher is OPENMPI:
        return any(variables.number(name) is not None for name in (launcher.rank, launcher.size))
    if launcher is PALS:
        # on Cray machines, SLURM's own steps have its variables (--mpi=cray_shasta), in a shell of `srun --pty` too
        if has_step_id(variables) or variables.number(launcher.size) == 1:
            return False
        return any(variables.number(name) is not None for name in (launcher.rank, launcher.local_rank))
    names = launcher.variables if launcher.needs_all else (launcher.rank,)
    return all(variables.text(name) is not None for name in names) and variables.may_exceed_one(launcher.size)


def is_complete(variables: Variables, launcher: Launcher) -> bool:
    """Whether all variables are set that a place needs."""
    return all(variables.text(name) is not None for name in launcher.variables)


def mpi_place(variables: Variables, launcher: Launcher) -> Place:
    """The place of a launcher's process, on equally filled nodes.

    Raises:
        ClusterEnvironmentError: variables are missing or contradict each other, the nodes are filled unequally, or
            there are several nodes and no variable names rank zero's.
    """
    rank = variables.needed_number(launcher.rank, launcher.size)
    world_size = variables.needed_number(launcher.size, launcher.rank)
    local_rank = variables.needed_number(launcher.local_rank, launcher.rank)
    variables.require_below(launcher.rank, launcher.size)
    num_nodes, local_world_size = _shape(variables, launcher, world_size)
    _refuse_inner_step(variables, launcher)
    # Open MPI's NODE_RANK is a rank on the node, not the node's rank, which follows from the mapping
    if num_nodes * local_world_size == world_size and local_rank == rank % local_world_size:  # by slot
        node_rank = rank // local_world_size
    elif num_nodes * local_world_size == world_size and local_rank == rank // num_nodes:  # by node
        node_rank = rank % num_nodes
    else:
        raise variables.error(
            "expected the same number of ranks on every node, placed by slot or by node; "
            "use mpirun --map-by ppr:N:node, or your launcher's option for N ranks per node",
            *launcher.variables,
        )
    nodes = _nodes(variables, num_nodes)
    return Place(
        rank=rank,
        local_rank=local_rank,
        node_rank=node_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        num_nodes=num_nodes,
        master_addr=_master_addr(variables, launcher, num_nodes, nodes),
        nodes=nodes,
    )


def _shape(variables: Variables, launcher: Launcher, world_size: int) -> tuple[int, int]:
    """Number of nodes, and ranks on each."""
    if launcher.local_size is not None:
        local_world_size = variables.needed_number(launcher.local_size, launcher.rank)
        variables.require_below(launcher.local_rank, launcher.local_size)
        return max(1, world_size // max(1, local_world_size)), local_world_size
    assert launcher.num_nodes is not None
    num_nodes = max(1, variables.needed_number(launcher.num_nodes, launcher.rank))
    return num_nodes, max(1, world_size // num_nodes)


def port_seed(variables: Variables) -> int:
    """A number that all ranks of one launch share, from the launch's id, or else from the job's; 0 if neither is known.

    LSF and PBS give only the job's id. MPICH's launcher Hydra gives none without a scheduler.
    """
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "FLUX_JOB_ID", "PALS_APID", "LSB_JOBID", "PBS_JOBID")
    values = (variables.text(name) for name in names)
    return next((zlib.crc32(value.encode()) for value in values if value is not None), 0)


def _refuse_inner_step(variables: Variables, launcher: Launcher) -> None:
    # a launcher's daemons form a step of one task per node; in any other step, srun was started by the ranks
    if in_step(variables) and not has_one_task_per_node(variables):
        variables.require_equal(launcher.rank, "SLURM_PROCID")
        variables.require_equal(launcher.size, "SLURM_STEP_NUM_TASKS")


def _nodes(variables: Variables, num_nodes: int) -> tuple[str, ...]:
    """The names of the nodes from SLURM's or LSF's variables; empty if they don't name as many."""
    names = job_nodes(variables)
    lsf_hosts = variables.text("LSB_MCPU_HOSTS")
    if not names and lsf_hosts is not None:
        # HOST SLOTS HOST SLOTS ...; jsrun's ranks don't run on the first, which runs the batch script
        hosts = tuple(lsf_hosts.split()[::2])
        names = hosts[1:] if len(hosts) == num_nodes + 1 else hosts
    return names if len(names) == num_nodes else ()


def _master_addr(variables: Variables, launcher: Launcher, num_nodes: int, nodes: tuple[str, ...]) -> str:
    address = variables.text("MASTER_ADDR")
    if address is not None:
        if num_nodes > 1 and is_loopback(address):
            raise variables.error(
                "expected MASTER_ADDR to reach rank zero from every node, got a loopback address; "
                f"{launcher.address_option}, where HOST is the first host in its list",
                *("MASTER_ADDR", launcher.size),
            )
        return address
    if num_nodes == 1:
        return "127.0.0.1"
    if nodes:
        return nodes[0]
    raise variables.error(
        "expected MASTER_ADDR, since the ranks are on several nodes and no other variable names rank zero's node; "
        f"{launcher.address_option}, where HOST is the first host in its list",
        *launcher.variables,
    )


def refuse_unknown(variables: Variables) -> None:
    """Raise if a launcher started this process whose variables don't place every rank, unless this is its only process.

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

"""The place of this process in the world, its ports and its cores, derived once from its environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from hpctrain.cluster import launchers, slurm_step
from hpctrain.cluster.slurm_step import JobVariables, in_step, own_node
from hpctrain.cluster.variables import START_RANKS, Place, Variables, ignored_message

LOWEST_PORT = 10_000
"""First derived port: above the privileged ones and most services."""
NUM_PORTS = 22_751
"""A prime; the last derived port is 32750, below the kernel's ephemeral range (32768 to 60999)."""
NUM_CANDIDATES = 9

_STEP_STRIDE = 151
_RESTART_STRIDE = 10 * _STEP_STRIDE
_CANDIDATE_STRIDE = 5_003


class Source(StrEnum):
    """The launcher that started this process, according to its variables."""

    SLURM = "slurm"
    """srun: this process is a task of a step."""
    TORCHRUN = "torchrun"
    """torchrun, or a launcher that sets the same variables, such as `cluster=local`."""
    OPENMPI = "openmpi"
    FLUX = "flux"
    PALS = "pals"
    """mpiexec of HPE's PALS."""
    MVAPICH = "mvapich"
    """MVAPICH's mpirun_rsh."""
    JSRUN = "jsrun"
    HYDRA = "hydra"
    """mpiexec or mpirun of MPICH, Intel MPI or MVAPICH."""
    SINGLE = "single"
    """No launcher of ranks: a login node, a laptop, a batch script, an interactive shell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterEnvironment(Place):
    """A `Place`, the port of rank zero, and the job around it."""

    master_port: int
    """The preferred port of rank zero."""
    port_candidates: tuple[int, ...]
    """Ports to try in turn, `master_port` first: rank zero binds the first free one."""
    node_name: str | None
    """SLURM's name for this process's node, which may differ from the host name; None outside of SLURM."""
    job_id: str | None
    """SLURM's id, as users type it: `12`, or `12_3` for a task of an array."""
    array_task: int | None
    restart_count: int
    """How often SLURM requeued the job; outside SLURM, how often torchrun restarted the ranks."""
    step_id: str | None
    """Number of the srun step to which this process belongs."""
    source: Source
    cpus: int | None
    """Cores that SLURM allocated to this rank; None outside of a step of srun, or if it is unknown."""
    variables: Mapping[str, str] = field(compare=False)
    """The environment variables from which this was derived."""
    unparsable: Mapping[str, str] = field(compare=False)
    """Those among them that were ignored, because their values can't be parsed and aren't needed."""

    @classmethod
    def from_environment(cls, variables: Mapping[str, str], *, master_port: int | None = None) -> ClusterEnvironment:
        """Derive it from `variables`, such as `os.environ`.

        The innermost launcher counts: torchrun before one of MPI's, and those before srun. All others must agree with
        it.

        Args:
            variables: environment variables; empty ones count as unset.
            master_port: a port that the user chose, instead of a derived one.

        Raises:
            ClusterEnvironmentError: variables that are needed are missing, can't be read, or contradict each other.
        """
        read = Variables(variables)
        source = _source(read)
        place = _place(read, source)
        job = JobVariables.read(read)
        ports = _ports(read, source, job, master_port)
        elastic = (read.number("TORCHELASTIC_RESTART_COUNT") or 0) if source is Source.TORCHRUN else 0
        return cls(
            **asdict(place) | {"address_candidates": place.address_candidates or (place.master_addr,)},
            master_port=ports[0],
            port_candidates=ports,
            node_name=_node_name(read, source, place.nodes),
            job_id=job.job_id,
            array_task=job.array_task,
            restart_count=elastic if job.job_id is None else job.restart_count,
            step_id=job.step_id,
            source=source,
            cpus=slurm_step.task_cpus(read, place.local_world_size) if source is Source.SLURM else None,
            variables=read.values_read,
            unparsable=read.unparsable,
        )

    @property
    def node_addresses(self) -> tuple[str, ...]:
        """Names or addresses of the nodes, as far as they are known; empty on a single one."""
        return tuple(dict.fromkeys((*self.nodes, *self.address_candidates))) if self.num_nodes > 1 else ()

    @property
    def ignored_message(self) -> str:
        """A line for the log about `unparsable`; empty if there is nothing to say."""
        return ignored_message(self.unparsable)

    @property
    def token(self) -> str:
        """A string that all ranks of a run share, and that differs between jobs, steps and restarts."""
        requeues = self.restart_count if self.job_id is not None else 0
        # torchrun's agents don't agree on the number of restarts: each counts only its own
        elastic = self.variables.get("TORCHELASTIC_RESTART_COUNT", "0") if self.num_nodes == 1 else "0"
        # the port distinguishes runs on one machine that have no job id
        return f"{self.job_id}.{self.step_id}.{requeues}.{elastic}.{self.master_port}"


def is_rank(variables: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as a rank, so that it has to train, not launch ranks.

    Raises:
        ClusterEnvironmentError: it is one of several processes, and not all that a rank has to know is set.
    """
    return _source(Variables(variables)) is not Source.SINGLE


def _source(variables: Variables) -> Source:
    # innermost first: torchrun may run inside mpirun, and mpirun inside a step of srun
    if variables.text("TORCHELASTIC_RUN_ID") is not None:
        return Source.TORCHRUN
    launcher = launchers.launcher_of(variables)
    has_torchruns = launchers.has_torchrun_place(variables)
    # a user may export what the launcher leaves out
    if launcher is not None and (launchers.is_complete(variables, launcher) or not has_torchruns):
        return Source(launcher.name)
    if in_step(variables):
        return Source.SLURM
    if has_torchruns:
        return Source.TORCHRUN
    # without these, each of several processes would train the whole run alone
    if variables.may_exceed_one("WORLD_SIZE"):
        launchers.refuse_partial(variables)
    launchers.refuse_unknown(variables)
    return Source.SINGLE


def _place(variables: Variables, source: Source) -> Place:
    match source:
        case Source.TORCHRUN:
            return launchers.torchrun_place(variables)
        case Source.SLURM:
            launchers.refuse_contradiction(variables, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
            return slurm_step.place(variables)
        case Source.SINGLE:
            launchers.refuse_partial(variables)
            return _single(variables)
        case _:
            launcher = launchers.launcher_of(variables)
            assert launcher is not None
            launchers.refuse_contradiction(variables, launcher.rank, launcher.size, launcher.local_rank)
            return launchers.mpi_place(variables, launcher)


def _node_name(variables: Variables, source: Source, nodes: tuple[str, ...]) -> str | None:
    # launchers of MPI may pass the variables of another node on
    if source not in {Source.SLURM, Source.TORCHRUN, Source.SINGLE}:
        return None
    name, number = own_node(variables), variables.number("SLURM_NODEID")
    # SLURM_NODEID counts in the order of the list, whatever the order of the ranks is
    return nodes[number] if name is None and source is Source.SLURM and nodes and number is not None else name


def _single(variables: Variables) -> Place:
    return Place(
        rank=0,
        local_rank=0,
        node_rank=0,
        world_size=1,
        local_world_size=1,
        num_nodes=1,
        master_addr="127.0.0.1",
        nodes=() if (name := own_node(variables)) is None else (name,),
    )


def _ports(variables: Variables, source: Source, job: JobVariables, user_port: int | None) -> tuple[int, ...]:
    """Return the user's choice, or else derived ports."""
    exported_port, is_needed = variables.port("MASTER_PORT"), source is Source.TORCHRUN
    if is_needed and exported_port is None:
        message = f"expected MASTER_PORT to be a port from 1 to 65535; correct it, or {START_RANKS}"
        raise variables.error(message, "MASTER_PORT")
    if is_needed and user_port not in {None, exported_port}:
        raise variables.error(
            f"expected cluster.master_port={user_port} to be MASTER_PORT, the port that torchrun already serves; "
            "give the port to torchrun, or unset cluster.master_port",
            "MASTER_PORT",
        )
    preferred = exported_port if user_port is None else user_port
    if preferred is not None:
        return (preferred,)
    # the number of the task, not of its array: two tasks of one array may share a node
    number = job.number
    if job.job_id is None and source is not Source.SINGLE:
        number = launchers.port_seed(variables)
    return derived_ports(job=number, step=job.step_number, restart=job.restart_count)


def cpu_threads(
    environment: ClusterEnvironment, cpus_per_process: int | None, variables: Mapping[str, str]
) -> int | None:
    """Number of threads for one rank's operations; None keeps torch's default.

    The user's OMP_NUM_THREADS comes first, then the rank's cores (`cpu_cores`), unless it has all of this machine's.
    """
    if "OMP_NUM_THREADS" in variables:
        return None
    if cpus_per_process is None and environment.cpus is None and environment.local_world_size == 1:
        return None
    # more threads than cores slow a rank down: they spin while they wait
    return cpu_cores(environment, cpus_per_process)


def cpu_cores(environment: ClusterEnvironment, cpus_per_process: int | None) -> int:
    """Cores of one rank: the configured number, else its share of the allocated cores or of the machine's."""
    if cpus_per_process is not None:
        return cpus_per_process
    if environment.cpus is not None:
        return environment.cpus
    return max(1, len(os.sched_getaffinity(0)) // environment.local_world_size)


def derived_ports(*, job: int, step: int = 0, restart: int = 0) -> tuple[int, ...]:
    """Candidate ports for a job's step, the preferred one first; every rank computes the same ones.

    They are below the kernel's ephemeral range, from which any outgoing connection may take a port. A step of srun that
    looks for a free port first would cost a step, and the port may be taken a moment later. So each is a guess and can
    be in use: rank zero binds the first free candidate, and the others try them in turn. On a
    node that jobs share, another program may answer on a candidate port: a rank that connects must check that it
    reached its own run.

    The preferred port is `LOWEST_PORT + (job + 151 step + 1510 restart) mod 22751`, a number in mixed radix: jobs fewer
    than 151 apart, in any of 10 steps and 15 restarts, never share one (151 * 10 * 15 < 22751). Because the modulus is
    prime, a port repeats along one of the three only after 22751 jobs, steps or restarts.

    Args:
        job: number of the job; each task of an array has its own.
        step: number of the step in the job.
        restart: how often the job was requeued.
    """
    preferred = job + _STEP_STRIDE * step + _RESTART_STRIDE * restart
    return tuple(LOWEST_PORT + (preferred + k * _CANDIDATE_STRIDE) % NUM_PORTS for k in range(NUM_CANDIDATES))

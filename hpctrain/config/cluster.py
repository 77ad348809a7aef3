"""``conf/cluster``: where the ranks run, and what they request from the scheduler. Owner: hpctrain.launch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from hpctrain.config import require
from hpctrain.config.requeue import Requeue
from hpctrain.errors import ConfigError

GPUS = "set cluster.gpus_per_node=N, and cluster.constraint for a type of GPU"
OWNED_SBATCH_KEYS = {
    "array": "a sweep sets it: -m with comma-separated values",
    "job-name": "set name",
    "nodes": "set nodes",
    "ntasks": "set nodes and cluster.processes_per_node",
    "ntasks-per-node": "set cluster.processes_per_node",
    "no-kill": "set cluster.spare_nodes",
    "output": "logs go into the run directory",
    "error": "logs go into the run directory",
    "open-mode": "hpctrain appends to logs, so that a requeue keeps them",
    "cpus-per-task": "set cluster.cpus_per_process",
    "gpus": GPUS,
    "gpus-per-node": GPUS,
    "gpus-per-socket": GPUS,
    "gpus-per-task": GPUS,
    "mem": "set cluster.memory_gb",
    "time": "set cluster.time_limit_min",
    "partition": "set cluster.partition",
    "account": "set cluster.account",
    "qos": "set cluster.qos",
    "constraint": "set cluster.constraint",
    "exclude": "set cluster.exclude",
    "reservation": "set cluster.reservation",
    "signal": "set cluster.signal and cluster.signal_delay_s",
    "wrap": "hpctrain writes the batch script",
    "parsable": "hpctrain reads the output of sbatch",
}
"""sbatch options that hpctrain sets, and what to use instead."""
ASKS_FOR_GPUS = re.compile(r"(^|,)\s*(gres[/:])?gpu\s*([:=(,]|$)")
"""Matches a value of sbatch's gres or tres-per-task that contains GPUs."""


@dataclass(kw_only=True, slots=True)
class Cluster:
    """Keys of every cluster."""

    kind: str = "local"
    """`local` for this machine, `slurm` for sbatch; set by the option, not by hand."""
    gpus_per_node: int | None = None
    """GPUs per node; null: all visible ones with cluster=local, none with cluster=slurm."""
    gpus_per_process: int = 1
    """GPUs per process; more than 1 for a task that splits its model over several devices."""
    processes_per_node: int | None = None
    """Ranks per node; null: gpus_per_node / gpus_per_process, or 1 without a GPU."""
    cpus_per_process: int | None = None
    """CPU cores per process; null: the scheduler's default, or an equal share of this machine's cores."""
    network_interface: str | None = None
    """Network interface for gloo and NCCL, such as ib0 (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); null: they choose."""
    master_port: int | None = None
    """TCP port on which rank zero listens; null: derived from the job, or the next free one."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables for the ranks, name to value."""
    wait: bool = False
    """Follow the run to its end, and exit with its code; local runs always do."""
    dry_run: bool = False
    """Print what would be launched, without launching it."""

    def __post_init__(self) -> None:
        """Check single values."""
        require.one_of("cluster.kind", self.kind, ("local", "slurm"))
        require.at_least("cluster.gpus_per_node", self.gpus_per_node, 0)
        require.at_least("cluster.gpus_per_process", self.gpus_per_process, 1)
        require.at_least("cluster.processes_per_node", self.processes_per_node, 1)
        require.at_least("cluster.cpus_per_process", self.cpus_per_process, 1)
        require.single_line("cluster.network_interface", self.network_interface)
        if self.master_port is not None:
            require.between("cluster.master_port", self.master_port, 1024, 65535)
        for name, value in self.env.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ConfigError(f"cluster.env.{name}", value, "is not a variable name", "use letters, digits and _")
            require.single_line(f"cluster.env.{name}", value)


@dataclass(kw_only=True, slots=True)
class Local(Cluster):
    """This machine: one process per GPU, or `processes_per_node`; in this process when there is one."""


@dataclass(kw_only=True, slots=True)
class Slurm(Cluster):
    """A SLURM cluster: one sbatch job per run, one array per sweep."""

    kind: str = "slurm"
    """`slurm`; set by the option, not by hand."""
    partition: str | None = None
    """Partition; null: the cluster's default."""
    account: str | None = None
    """Account to charge; null: the user's default."""
    qos: str | None = None
    """Quality of service; null: the user's default."""
    memory_gb: float | None = None
    """Memory per node in GB; null: the partition's default."""
    time_limit_min: int = 60
    """Wall-clock bound of one attempt in minutes."""
    constraint: str | None = None
    """Required node features, as in sbatch --constraint."""
    exclude: str | None = None
    """Nodes not to use, as in sbatch --exclude."""
    spare_nodes: int = 0
    """Nodes that the job requests in addition to `nodes`. If a node dies, the ranks restart on the others without going
    back to the queue. Until then the spare nodes are idle, and are charged."""
    reservation: str | None = None
    """Reservation to run in."""
    signal: str = "USR2"
    """User signal that SLURM sends before the time limit: USR1 or USR2."""
    signal_delay_s: int = 90
    """Seconds between the signal and the time limit; must be long enough for a save."""
    setup: list[str] = field(default_factory=list)
    """Shell lines of the batch script before the run, such as `module load cuda`."""
    srun_args: list[str] = field(default_factory=list)
    """Additional arguments for srun, such as --cpu-bind=cores."""
    sbatch: dict[str, Any] = field(default_factory=dict)
    """Other sbatch options, name to value, true for a flag; such as +cluster.sbatch.licenses=matlab."""
    requeue: Requeue = field(default_factory=Requeue)
    """How often a run is continued automatically, by cause."""
    max_parallel_runs: int | None = None
    """Runs of a sweep that may run at the same time; null: no limit of hpctrain's."""

    def __post_init__(self) -> None:
        """Check single values."""
        Cluster.__post_init__(self)
        require.above("cluster.memory_gb", self.memory_gb, 0)
        require.at_least("cluster.time_limit_min", self.time_limit_min, 1, " minute")
        require.at_least("cluster.signal_delay_s", self.signal_delay_s, 0, " s")
        require.at_least("cluster.spare_nodes", self.spare_nodes, 0)
        require.at_least("cluster.max_parallel_runs", self.max_parallel_runs, 1)
        require.one_of("cluster.signal", self.signal, ("USR1", "USR2"))
        for key in ("partition", "account", "qos", "constraint", "exclude", "reservation"):
            require.single_line(f"cluster.{key}", getattr(self, key))
        for argument in self.srun_args:
            require.single_line("cluster.srun_args", argument)
        if self.signal_delay_s >= self.time_limit_min * 60:
            raise ConfigError(
                "cluster.signal_delay_s",
                self.signal_delay_s,
                f"must be shorter than the time limit of {self.time_limit_min} min",
                "shorten it, or raise cluster.time_limit_min",
            )
        for name, value in self.sbatch.items():
            self._check_sbatch(name, value)

    @staticmethod
    def _check_sbatch(name: str, value: object) -> None:
        key, spelled = f"cluster.sbatch.{name}", name.replace("_", "-")
        if spelled in OWNED_SBATCH_KEYS:
            raise ConfigError(key, value, "has a key of its own", OWNED_SBATCH_KEYS[spelled])
        if spelled in ("gres", "tres-per-task") and ASKS_FOR_GPUS.search(str(value)):
            # hpctrain would not count them, and train on the CPU; SLURM refuses a GPU type together with gpus_per_node
            raise ConfigError(key, value, "requests GPUs, which have a key of their own", GPUS)
        if not re.fullmatch(r"[a-z][a-z0-9-]*", spelled):
            raise ConfigError(key, value, "is not an sbatch option", "write the long name without its dashes")
        if not isinstance(value, bool | int | float | str):
            raise ConfigError(key, value, "is not a single value", "write a text, a number, or true for a flag")
        require.single_line(key, str(value))

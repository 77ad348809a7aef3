"""``conf/cluster``: where the ranks run, and what they request from the scheduler. Owner: hpctrain.launch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from hpctrain.config import require
from hpctrain.config.container import Container
from hpctrain.config.rank_variables import check_variables
from hpctrain.errors import ConfigError

GPUS = "set cluster.gpus_per_node=N, and cluster.constraint for a type of GPU"
OWNED_SBATCH_KEYS = {
    "array": "a sweep sets it: -m with comma-separated values",
    "job-name": "set name",
    "nodes": "set nodes, and cluster.min_nodes for a range",
    "ntasks": "set nodes and cluster.processes_per_node",
    "ntasks-per-node": "set cluster.processes_per_node",
    "no-kill": "set cluster.spare_nodes or cluster.min_nodes",
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

MAX_NODES = 65_536
"""SLURM's own bound on a list of nodes."""
MAX_CPUS = 65_535
"""SLURM's own bound on the tasks and CPUs of a node, which it counts in 16 bits."""


def kind_of_option(kind: str) -> require.Check:
    """Refuse another kind than the option's own."""
    return require.that(lambda value: value == kind, "is set by the option", "write cluster=local or cluster=slurm")


def _check_sbatch(key: str, options: Mapping[str, object]) -> None:
    for name, value in options.items():
        _check_option(f"{key}.{name}", name.replace("_", "-"), value)


def _check_option(key: str, option: str, value: object) -> None:
    if option in OWNED_SBATCH_KEYS:
        raise ConfigError(key, value, "has a key of its own", OWNED_SBATCH_KEYS[option])
    if option in ("gres", "tres-per-task") and ASKS_FOR_GPUS.search(str(value)):
        # hpctrain would not count them, and train on the CPU; SLURM refuses a GPU type together with gpus_per_node
        raise ConfigError(key, value, "requests GPUs, which have a key of their own", GPUS)
    if not re.fullmatch(r"[a-z][a-z0-9-]*", option):
        raise ConfigError(key, value, "is not an sbatch option", "write the long name without its dashes")
    if not isinstance(value, bool | int | float | str):
        raise ConfigError(key, value, "is not a single value", "write a string, a number, or true for a flag")
    require.single_line(key, str(value))


def _check_python(key: str, value: str) -> None:
    if value.startswith("~"):
        problem = "begins with ~, which hpctrain doesn't expand"
        raise ConfigError(key, value, problem, "write the absolute path; a shell replaces $HOME by yours")
    if "/" in value and not value.startswith("/"):
        remedy = f"write the absolute path, such as {Path.cwd() / value}"
        raise ConfigError(key, value, "is a relative path", remedy)
    if value.endswith("/"):
        raise ConfigError(key, value, "is a folder", f"write the program in it, such as {value}bin/python")
    if "/" not in value and not re.fullmatch(r"\w[\w.+-]*", value):
        problem = "is neither an absolute path nor the name of a program"
        raise ConfigError(key, value, problem, "write such as /opt/venv/bin/python, or python3")


@dataclass(kw_only=True, slots=True)
class Requeue(require.Checked):
    """Budgets over the whole run; hpctrain never requeues a cancelled run or a task's own error.

    Owner: hpctrain.attempt.
    """

    prefix = "cluster.requeue."

    max_preemptions: Annotated[int | None, require.at_least(0)] = None
    """Preemptions that the run survives; null: no limit."""
    max_time_limits: Annotated[int | None, require.at_least(0)] = None
    """Time limits that the run survives; null: no limit."""
    max_failures: Annotated[int, require.at_least(0)] = 3
    """Hangs, infrastructure errors, out-of-memory kills and unexplained signals, in total, that the run survives."""
    max_stalled_attempts: Annotated[int, require.at_least(1)] = 2
    """Consecutive attempts without a new step after which the run ends; preemption, node failure and an unexplained
    signal don't count."""


@dataclass(kw_only=True, slots=True)
class Cluster(require.Checked):
    """Keys of every cluster."""

    kind: str = "local"
    """`local` for this machine, `slurm` for sbatch; set by the option, not by hand."""
    gpus_per_node: Annotated[int | None, require.at_least(0, at_most=MAX_CPUS)] = None
    """GPUs per node; null: all visible ones with cluster=local, none with cluster=slurm."""
    gpus_per_process: Annotated[int, require.at_least(1, at_most=MAX_CPUS)] = 1
    """GPUs per process; more than 1 for a task that splits its model over several devices."""
    processes_per_node: Annotated[int | None, require.at_least(1, at_most=MAX_CPUS)] = None
    """Ranks per node; null: gpus_per_node / gpus_per_process; 1 if there is no GPU or their number is unknown."""
    cpus_per_process: Annotated[int | None, require.at_least(1, at_most=MAX_CPUS)] = None
    """CPU cores per process; null: the scheduler's default, or an equal share of this machine's cores."""
    network_interface: Annotated[str | None, require.single_line, require.not_empty] = None
    """Network interface for gloo and NCCL, such as ib0 (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); null: they choose."""
    master_port: Annotated[int | None, require.between(1024, 65535)] = None
    """TCP port on which rank zero listens for other nodes; null: derived from the job, or the next free one."""
    env: Annotated[dict[str, str], check_variables] = field(default_factory=dict)
    """Environment variables for the ranks, name to value."""
    wait: bool = False
    """Follow the run to its end, and exit with its code; local runs always do."""
    dry_run: bool = False
    """Print what would be launched, without launching it."""


@dataclass(kw_only=True, slots=True)
class Local(Cluster):
    """This machine: one process per GPU, or `processes_per_node`; in this process when there is one."""

    kind: Annotated[str, kind_of_option("local")] = "local"
    """`local`; set by the option, not by hand."""


@dataclass(kw_only=True, slots=True)
class Slurm(Cluster):
    """A SLURM cluster: one sbatch job per run, one array per sweep."""

    kind: Annotated[str, kind_of_option("slurm")] = "slurm"
    """`slurm`; set by the option, not by hand."""
    partition: Annotated[str | None, require.single_line, require.not_empty] = None
    """Partition; null: SBATCH_PARTITION, or the cluster's default."""
    account: Annotated[str | None, require.single_line, require.not_empty] = None
    """Account to charge; null: SBATCH_ACCOUNT, or the user's default."""
    qos: Annotated[str | None, require.single_line, require.not_empty] = None
    """Quality of service; null: SBATCH_QOS, or the user's default."""
    # at least a megabyte: SLURM takes 0 for all of a node's memory
    memory_gb: Annotated[float | None, require.between(0.001, 1e6)] = None
    """Memory per node in GB; null: the partition's default."""
    time_limit_min: Annotated[int, require.at_least(1, " minute", at_most=5_256_000)] = 60
    """Wall-clock bound of one attempt in minutes."""
    constraint: Annotated[str | None, require.single_line, require.not_empty] = None
    """Required node features, as in sbatch --constraint."""
    exclude: Annotated[str | None, require.single_line, require.not_empty] = None
    """Nodes not to use, as in sbatch --exclude."""
    spare_nodes: Annotated[int, require.at_least(0, at_most=MAX_NODES)] = 0
    """Nodes that the job requests in addition to `nodes`. If a node dies, the ranks restart on the others without going
    back to the queue. Until then the spare nodes are idle, and are charged."""
    min_nodes: Annotated[int | None, require.at_least(1, at_most=MAX_NODES)] = None
    """Fewest nodes with which the run may start or continue; null: always `nodes`. Only numbers of nodes are used whose
    ranks divide the global batch, and fit parallel=mesh. With another number than before, the samples of each step are
    the same, but the weights are no longer equal bit for bit to those of an uninterrupted run."""
    reservation: Annotated[str | None, require.single_line, require.not_empty] = None
    """Reservation to run in; null: SBATCH_RESERVATION, or none."""
    # both are free: SLURM itself sends SIGTERM, SIGCONT and SIGKILL
    signal: Annotated[str, require.one_of("USR1", "USR2")] = "USR2"
    """User signal that SLURM sends before the time limit: USR1 or USR2."""
    # SLURM checks about once a minute, so the signal may come up to 60 s early (sbatch(1), --signal)
    signal_delay_s: Annotated[int, require.at_least(0, " s", at_most=65_535)] = 90
    """Seconds between the signal and the time limit; must be long enough for a save."""
    setup: list[str] = field(default_factory=list)
    """Shell lines of the batch script before the run, such as `module load cuda`. A line that fails ends the job,
    unless it ends with `|| true`."""
    python: Annotated[str | None, require.not_empty, require.single_line, _check_python] = None
    """Python of the ranks, with hpctrain and torch: an absolute path, or a name such as python3, which is looked up in
    PATH after the lines of `cluster.setup`; null: the Python that submits. In a container it is the container's; null:
    python3."""
    container: Container = field(default_factory=Container)
    """The container of the ranks, if they run in one."""
    srun_args: Annotated[list[str], require.each(require.single_line)] = field(default_factory=list)
    """Additional arguments for srun, such as --cpu-bind=cores; not --job-name, which hpctrain needs."""
    sbatch: Annotated[dict[str, Any], _check_sbatch] = field(default_factory=dict)
    """Other sbatch options, name to value, true for a flag; such as cluster.sbatch.licenses=matlab."""
    requeue: Requeue = field(default_factory=Requeue)
    """How often a run is continued automatically, by cause."""
    max_parallel_runs: Annotated[int | None, require.at_least(1)] = None
    """Runs of a sweep that may run at the same time; null: no limit of hpctrain's."""

    def __post_init__(self) -> None:
        """Also refuse a signal that would be due before the start."""
        # not super(): slots=True makes a second class, and super() looks for the first (CPython issue 90562)
        Cluster.__post_init__(self)
        if self.signal_delay_s >= self.time_limit_min * 60:
            problem = f"must be shorter than the time limit of {self.time_limit_min} min"
            remedy = "shorten it, or raise cluster.time_limit_min"
            raise ConfigError("cluster.signal_delay_s", self.signal_delay_s, problem, remedy)

    @property
    def node_python(self) -> str | None:
        """The Python of ranks on the nodes, outside of any container; None: the Python that submits."""
        return self.python if self.container.image is None else None

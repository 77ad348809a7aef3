"""``conf/cluster``: where the ranks run, and what they request from the scheduler. Owner: hpctrain.launch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

from hpctrain.config import require
from hpctrain.config.gpu_request import FORMS, MAX_GPUS, GpuRequest
from hpctrain.config.require import check_variables
from hpctrain.errors import ConfigError
from hpctrain.scheduler.gres import ASKS_FOR_GPUS

if TYPE_CHECKING:
    from omegaconf import DictConfig

ENGINE_NAMES = ("apptainer", "charliecloud", "oci", "pyxis")
"""What can start containers on the nodes."""
IMAGE_FILES = (".sif", ".sqsh", ".sqfs", ".squashfs", ".img", ".tar")
"""How the names of files end that contain an image."""
SEPARATORS = ",:"
"""Characters that the engines' options take for the end of a path."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or folder of the node that the ranks see in their container.

    Attributes:
        host: its path on the node.
        inside: its path in the container.
        is_read_only: whether the ranks can't write there.
    """

    host: str
    inside: str
    is_read_only: bool = False

    @classmethod
    def read(cls, text: str) -> Mount:
        """Read ``HOST[:CONTAINER[:ro]]``, or ``HOST:ro``, whose form was checked."""
        paths = _paths_of(text)
        return cls(paths[0], paths[-1], is_read_only=text.endswith(":ro"))


def _paths_of(mount: str) -> list[str]:
    return mount.removesuffix(":ro").split(":")


def _check_mount(key: str, text: str) -> None:
    require.single_line(key, text)
    paths = _paths_of(text)
    if len(paths) > 2 or not all(paths):
        raise ConfigError(key, text, "is not a mount", "write HOST, HOST:CONTAINER or HOST:CONTAINER:ro")
    for path in paths:
        if "," in path:
            raise ConfigError(key, text, "contains a comma, at which the engines end a path", "use another path")
        if not path.startswith("/"):
            raise ConfigError(key, text, "is not absolute", "write absolute paths; a shell replaces $HOME by yours")
        if ".." in PurePosixPath(path).parts or path.strip("/") == "":
            raise ConfigError(key, text, "can't be mounted", "name a folder below /, without ..")


NOT_EXPANDED = require.that(
    lambda path: not path.startswith("~"),
    "begins with ~, which hpctrain doesn't expand",
    "write the absolute path; a shell replaces $HOME by yours",
)
NO_OPTION = require.that(
    lambda image: not image.startswith("-"), "begins with a dash, as an option does", "name an image"
)


@dataclass(kw_only=True, slots=True)
class Container(require.Checked):
    """The container of the ranks; the batch script stays outside.

    Owner: hpctrain.launch.
    """

    # not sbatch's --container: the supervisor runs SLURM's commands, and images have neither them nor munge's socket

    prefix = "cluster.container."

    image: Annotated[str | None, require.not_empty, require.single_line, NOT_EXPANDED, NO_OPTION] = None
    """Image in which the ranks run: the absolute path of a file or folder, or a name that the engine knows; null: no
    container. It must have hpctrain and torch."""
    engine: Annotated[str | None, require.one_of(*ENGINE_NAMES)] = None
    """What starts the containers: `pyxis`, `apptainer`, `charliecloud`, or `oci` for SLURM's own `srun --container`;
    required with an image."""
    mounts: Annotated[list[str], require.each(_check_mount)] = field(default_factory=list)
    """Files and folders that the ranks see, in addition to the run directory and the working directory: HOST,
    HOST:CONTAINER or HOST:CONTAINER:ro, absolute."""
    env: Annotated[dict[str, str], check_variables] = field(default_factory=dict)
    """Environment variables in the container, name to value, which are set before Python starts, such as PATH."""

    def __post_init__(self) -> None:
        """Also refuse keys without an image, an image without an engine, and what the engine can't do."""
        # not super(): slots=True makes a second class, and super() looks for the first (CPython issue 90562)
        require.Checked.__post_init__(self)
        if self.image is None:
            for name in ("engine", "mounts", "env"):
                if value := getattr(self, name):
                    remedy = "set cluster.container.image, or leave it out"
                    raise ConfigError(f"cluster.container.{name}", value, "has no effect without an image", remedy)
            return
        # a path doesn't tell which engine is meant: several read SIF files, squashfs files and folders
        if self.engine is None:
            choices = f"set cluster.container.engine to one of {', '.join(ENGINE_NAMES)}"
            raise ConfigError("cluster.container.image", self.image, "needs an engine that starts it", choices)
        self._refuse_relative_path(self.image)
        for text in self.mounts if self.engine == "charliecloud" else ():
            if Mount.read(text).is_read_only:
                problem = "is read-only, which Charliecloud can't do"
                raise ConfigError("cluster.container.mounts", text, problem, "leave :ro out")

    def _refuse_relative_path(self, image: str) -> None:
        if image.startswith("/"):
            return
        names_file = image.startswith(".") or image.endswith(IMAGE_FILES)
        if names_file or self.engine == "oci" or (self.engine == "apptainer" and "://" not in image):
            what = "the folder of a bundle" if self.engine == "oci" else "the image"
            remedy = f"write the absolute path of {what}"
            if self.engine in ("apptainer", "pyxis"):
                remedy += ", or a URI such as docker://pytorch/pytorch"
            raise ConfigError("cluster.container.image", image, "is a relative path", remedy)


def check_container(container: Container, srun_args: Sequence[str], ranks_per_node: int) -> None:
    """Refuse a container together with what can't work in it.

    Args:
        container: of the ranks; each value is already checked by itself.
        srun_args: the user's options for srun.
        ranks_per_node: that srun starts.

    Raises:
        ConfigError: the first combination that can't work.
    """
    if container.image is None:
        return
    for option in srun_args:
        if re.match(r"--container($|[=-])", option):
            remedy = "leave it out, or leave cluster.container out"
            raise ConfigError("cluster.srun_args", option, "starts a container, as cluster.container does", remedy)
    if container.engine == "oci" and ranks_per_node > 1:
        # "Task count specification invalid", and a task isn't told its number (SLURM 22.05)
        problem = f"starts one process in a container per node, but the run has {ranks_per_node} per node"
        remedy = "use another engine, or set cluster.processes_per_node=1"
        raise ConfigError("cluster.container.engine", "oci", problem, remedy)


def check_mounted(container: Container, what: str, path: str) -> None:
    """Refuse a path that the engines' options for mounts can't express.

    Args:
        container: of the ranks.
        what: the path is, for the message.
        path: that has to be mounted.

    Raises:
        ConfigError: it contains a separator.
    """
    separators = [character for character in SEPARATORS if character in path]
    if container.image is not None and separators:
        problem = f"contains {separators[0]!r}, at which the engines of containers end a path"
        raise ConfigError(what, path, problem, "use another folder")


GPU_REMEDY = "set cluster.gpus_per_node=N, and where needed cluster.gpu_type=a100 and cluster.gpu_request=gres"
OWNED_SBATCH_KEYS = {
    **{name: f"set cluster.{name}" for name in ("partition", "account", "qos", "constraint", "exclude", "reservation")},
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task"), GPU_REMEDY),
    **dict.fromkeys(("output", "error"), "logs go into the run directory"),
    "array": "a sweep sets it: -m with comma-separated values",
    "job-name": "set name",
    "nodes": "set nodes, and cluster.min_nodes for a range",
    "ntasks": "set nodes and cluster.processes_per_node",
    "ntasks-per-node": "set cluster.processes_per_node",
    "no-kill": "set cluster.spare_nodes or cluster.min_nodes",
    "open-mode": "hpctrain appends to logs, so that a requeue keeps them",
    "cpus-per-task": "set cluster.cpus_per_process",
    "mem": "set cluster.memory_gb",
    "time": "set cluster.time_limit_min",
    "signal": "set cluster.signal and cluster.signal_delay_s",
    "wrap": "hpctrain writes the batch script",
    "parsable": "hpctrain reads the output of sbatch",
}
"""sbatch options that hpctrain sets, and what to use instead."""

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
    if option == "tres-per-task" and any(ASKS_FOR_GPUS.match(part.strip()) for part in str(value).split(",")):
        # hpctrain would not count them, and train on the CPU
        raise ConfigError(key, value, "requests GPUs, which have a key of their own", GPU_REMEDY)
    if not re.fullmatch(r"[a-z][a-z0-9-]*", option):
        raise ConfigError(key, value, "is not an sbatch option", "write the long name without its dashes")
    if not isinstance(value, bool | int | float | str):
        raise ConfigError(key, value, "is not a single value", "write a string, a number, or true for a flag")
    require.single_line(key, str(value))


def _check_gpu_type(key: str, value: str) -> None:
    if not re.fullmatch(r"[\w.+-]+", value):
        raise ConfigError(key, value, "is not the name of a type", "write the type alone, and cluster.gpus_per_node=N")


def _check_python(key: str, value: str) -> None:
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
    gpus_per_node: Annotated[int | None, require.at_least(0, at_most=MAX_GPUS)] = None
    """GPUs per node; null: all visible ones with cluster=local; with cluster=slurm those of `cluster.sbatch.gres`, or
    none."""
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

    @property
    def gpus(self) -> GpuRequest:
        """The GPUs of a node that the run requests."""
        return GpuRequest(count=self.gpus_per_node)

    @property
    def node_gpus(self) -> int | None:
        """GPUs per node, by whichever key; None if no key sets a number."""
        return self.gpus.count


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
    gpu_type: Annotated[str | None, _check_gpu_type] = None
    """Type of the GPUs, such as a100, as `sinfo --format=%G` prints it; null: any."""
    gpu_request: Annotated[str | None, require.one_of(*FORMS)] = None
    """Form in which sbatch is asked for GPUs: `gpus_per_node` (--gpus-per-node=a100:4), `gres` (--gres=gpu:a100:4), or
    `gpus_per_task_type` (--gpus-per-task=a100:1; each process sees all GPUs of its node nevertheless); null:
    gpus_per_node."""
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
    python: Annotated[str | None, require.not_empty, require.single_line, NOT_EXPANDED, _check_python] = None
    """Python of the ranks, with hpctrain and torch: an absolute path, or a name such as python3, which is looked up in
    PATH after the lines of `cluster.setup`; null: the Python that submits. In a container it is the container's; null:
    python3."""
    container: Container = field(default_factory=Container)
    """The container of the ranks, if they run in one."""
    srun_args: Annotated[list[str], require.each(require.single_line)] = field(default_factory=list)
    """Additional arguments for srun, such as --cpu-bind=cores; not --job-name, which hpctrain needs."""
    sbatch: Annotated[dict[str, Any], _check_sbatch] = field(default_factory=dict)
    """Other sbatch options, name to value, true for a flag; such as cluster.sbatch.licenses=matlab, or
    "cluster.sbatch.gres='gpu:a100:4,nvme:1'", whose GPUs count as those of `cluster.gpus_per_node`."""
    requeue: Requeue = field(default_factory=Requeue)
    """How often a run is continued automatically, by cause."""
    max_parallel_runs: Annotated[int | None, require.at_least(1)] = None
    """Runs of a sweep that may run at the same time; null: no limit of hpctrain's."""

    def __post_init__(self) -> None:
        """Also refuse a signal that would be due before the start, and GPUs that two keys request."""
        # not super(): slots=True makes a second class, and super() looks for the first (CPython issue 90562)
        Cluster.__post_init__(self)
        if self.signal_delay_s >= self.time_limit_min * 60:
            problem = f"must be shorter than the time limit of {self.time_limit_min} min"
            remedy = "shorten it, or raise cluster.time_limit_min"
            raise ConfigError("cluster.signal_delay_s", self.signal_delay_s, problem, remedy)
        _ = self.gpus  # raises if two keys request GPUs

    @property
    def gpus(self) -> GpuRequest:
        """The GPUs of a node that a job requests.

        Raises:
            ConfigError: the keys contradict each other.
        """
        gres = self.sbatch.get("gres")
        return GpuRequest.of_keys(
            gpus_per_node=self.gpus_per_node,
            gpu_type=self.gpu_type,
            gpu_request=self.gpu_request,
            gres=gres if isinstance(gres, str) else "",
        )

    @property
    def node_python(self) -> str | None:
        """The Python of ranks on the nodes, outside of any container; None: the Python that submits."""
        return self.python if self.container.image is None else None


SBATCH_VARIABLES = {key: f"SBATCH_{key.upper()}" for key in ("account", "partition", "qos", "reservation")}
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

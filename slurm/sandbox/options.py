"""The options of a sandbox."""

from __future__ import annotations

from dataclasses import dataclass

CPUS_PER_NODE = 8
GPUS_PER_NODE = 2
MEMORY_PER_NODE_MB = 65536


@dataclass(frozen=True, kw_only=True)
class Options:
    """The choices of `up`, as they are kept in the sandbox's record.

    Attributes:
        nodes: How many nodes, n1 to nN.
        accounting: Whether slurmdbd and a MariaDB of its own run, so that `sacct` works.
        grace_time_s: Seconds from the signal to the kill for a preempted job of the partition `low`.
        preempt_mode: REQUEUE or CANCEL, for preempted jobs.
        every_preemption: Whether there is a partition like `low` for each combination of REQUEUE and CANCEL, with and
            without grace time: `low_requeue`, `low_requeue_0`, `low_cancel`, `low_cancel_0`.
        preempt_send_user_signal: Whether preemption sends the job's `--signal` in place of SIGTERM.
        memory_limits: Whether a job that takes more memory than it asked for is killed.
        signal_children: Whether signals reach all processes of a job, and not its tasks alone.
        node_timeout_s: Seconds without an answer after which the controller gives a node up (SlurmdTimeout).
        max_array_size: How many tasks a job array may have (MaxArraySize).
        mpi_default: How srun starts tasks without `--mpi` (MpiDefault): none, or pmix, which Debian's SLURM can't load.
        oci: Whether `srun --container` works, with runc as the runtime (oci.conf).
        requeue: Whether SLURM requeues a job that doesn't ask for it (JobRequeue).
        switches: Whether the nodes are on two switches, the first of which has the last nodes: SLURM 26.05 gives those
            the first tasks (TopologyPlugin=topology/tree).
        expedite: Whether jobs may ask for `--requeue=expedite` (SlurmctldParameters=enable_expedited_requeue, from
            SLURM 25.11 on).
        gpu_types: Whether the first half of the nodes has GPUs of the type a100, and the others of the type h100, each
            half with a partition of that name; and each node two nvme, another generic resource.
        gpu_form: The only form in which sbatch takes a request of GPUs, and only with a type: gpus-per-node, gres or
            gpus-per-task (CliFilterPlugins=cli_filter/lua); any for all forms.
    """

    nodes: int = 4
    accounting: bool = False
    grace_time_s: int = 10
    preempt_mode: str = "REQUEUE"
    every_preemption: bool = False
    preempt_send_user_signal: bool = False
    memory_limits: bool = False
    signal_children: bool = False
    node_timeout_s: int = 20
    max_array_size: int = 1001
    mpi_default: str = "none"
    oci: bool = False
    requeue: bool = True
    switches: bool = False
    expedite: bool = False
    gpu_types: bool = False
    gpu_form: str = "any"

    @property
    def node_names(self) -> list[str]:
        """n1 to nN."""
        return [f"n{index}" for index in range(1, self.nodes + 1)]

    def gres(self, name: str) -> str:
        """The generic resources of a node."""
        types = [gpu_type for gpu_type, names in self.nodes_by_gpu_type.items() if name in names]
        return f"gpu:{types[0]}:{GPUS_PER_NODE},nvme:2" if types else f"gpu:{GPUS_PER_NODE}"

    @property
    def nodes_by_gpu_type(self) -> dict[str, list[str]]:
        """The names of the nodes by the type of their GPUs; empty without types."""
        half = (self.nodes + 1) // 2
        return {"a100": self.node_names[:half], "h100": self.node_names[half:]} if self.gpu_types else {}

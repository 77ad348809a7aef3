"""Environment variables: read with checks, and without those of a job; and the place among the ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.errors import ClusterEnvironmentError

_OF_A_JOB = re.compile(
    r"(SLURM|SBATCH_|SRUN_|SALLOC_|PMI|PRTE_|OMPI_|ORTE_|MV2_COMM_WORLD_|MVP_COMM_WORLD_|MPISPAWN_|JSM_|PALS_).*"
    r"|(TORCHELASTIC|SUBMITIT)_.*|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|NODE_RANK|MASTER_(ADDR|PORT)"
    r"|MPI_LOCAL(RANKID|NRANKS)|FLUX_(TASK_RANK|TASK_LOCAL_ID|JOB_SIZE|JOB_NNODES)|ALPS_APP_PE|MPT_LRANK|MP_CHILD",
    re.DOTALL,
)
"""Variables of a job and its ranks. Those that begin with SLURMD are the node's."""
_PASSED_ON = ("SLURM_CONF", "SLURM_JWT")
"""Without the first, SLURM's commands may not find the controller; a site that uses tokens rejects them without the
second."""
START_RANKS = "start the ranks with a launcher that sets it, such as srun or torchrun"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The position of one process among the ranks, and the address of rank zero."""

    rank: int
    """Rank in the world: 0 to world_size - 1."""
    local_rank: int
    """Rank on this node: 0 to local_world_size - 1."""
    node_rank: int
    """Index of this node: 0 to num_nodes - 1."""
    world_size: int
    """Number of ranks on all nodes."""
    local_world_size: int
    """Number of ranks on this node; nodes may differ."""
    num_nodes: int
    """Number of nodes that hold ranks."""
    master_addr: str
    """Host name or address of rank zero's node, as the other nodes reach it."""
    address_candidates: tuple[str, ...] = ()
    """Nodes where rank zero may be, `master_addr` first; empty means `master_addr` alone. There are several if no
    variable names rank zero's node, as on SLURM 26.05, which may place ranks in the order of the switches."""
    nodes: tuple[str, ...] = ()
    """Names of the nodes, node rank 0 first; empty if unknown."""


class Variables:
    """A mapping of environment variables that checks each value it reads.

    A value that hpctrain needs raises an error if it can't be parsed. Any other is recorded and ignored: newer
    launchers format some of them differently, and that must not end a run.

    Args:
        mapping: such as `os.environ`.

    Attributes:
        values_read: the variables that were read and set, with their values.
        unparsable: those among them that were ignored, because their values can't be parsed and aren't needed.
    """

    def __init__(self, mapping: Mapping[str, str]) -> None:
        self._mapping = mapping
        self.values_read: dict[str, str] = {}
        self.unparsable: dict[str, str] = {}

    def text(self, name: str) -> str | None:
        """The value of `name`, or None if it is unset or empty."""
        # an empty value counts as unset: shells and batch scripts export empty variables by accident
        value = self._mapping.get(name, "").strip()
        if not value:
            return None
        self.values_read[name] = value
        return value

    def number(self, name: str) -> int | None:
        """The value of `name` as a non-negative whole number; None if it is unset, empty or something else."""
        value = self.text(name)
        if value is None:
            return None
        if not (value.isascii() and value.isdigit()):
            self.ignore(name)
            return None
        return int(value)

    def port(self, name: str) -> int | None:
        """The value of `name` as a port; None if it is unset, empty or something else."""
        value = self.number(name)
        if value is not None and not 0 < value < 65_536:
            self.ignore(name)
            return None
        return value

    def may_exceed_one(self, name: str) -> bool:
        """Whether a number of processes is above 1, or can't be parsed.

        In doubt there are several: if each believed that it was alone, all of them would train the run. Deriving the
        place of such a process then raises an error about this variable.
        """
        return self.text(name) is not None and self.number(name) not in {0, 1}

    def ignore(self, name: str) -> None:
        """Record that the value of a variable can't be parsed, and isn't needed."""
        self.unparsable[name] = self._mapping[name]

    def needed_text(self, name: str, because: str) -> str:
        """The value of a variable that must be set.

        Args:
            name: the variable.
            because: the variable whose presence requires it.

        Raises:
            ClusterEnvironmentError: it is unset or empty.
        """
        value = self.text(name)
        if value is None:
            raise self.error(f"expected {name} in addition to {because}; set {name}, or unset {because}", because)
        return value

    def needed_number(self, name: str, because: str) -> int:
        """Like `needed_text`, for a non-negative whole number.

        Raises:
            ClusterEnvironmentError: it is unset or empty, or something else.
        """
        self.needed_text(name, because)
        value = self.number(name)
        if value is None:
            raise self.error(f"expected {name} to be a whole number from 0 up; correct it, or {START_RANKS}", name)
        return value

    def require_below(self, small: str, large: str) -> None:
        """Raise unless the number in `small` is below the number in `large` (a rank below its world size)."""
        first, second = self.number(small), self.number(large)
        if first is not None and second is not None and first >= second:
            problem = f"expected {small} to be below {large}; unset the one that an outer shell or script exported"
            raise self.error(problem, small, large)

    def require_equal(self, first: str, second: str) -> None:
        """Raise if both are set to different numbers, since two launchers then disagree."""
        first_number, second_number = self.number(first), self.number(second)
        if first_number is not None and second_number is not None and first_number != second_number:
            remedy = f"unset {first} if an outer shell or script exported it, or start the ranks with one launcher only"
            raise self.error(f"expected {first} and {second} to be equal; {remedy}", first, second)

    def error(self, message: str, *names: str) -> ClusterEnvironmentError:
        """Make an error about the variables in `names`, with their values."""
        return ClusterEnvironmentError(message, {name: self._mapping[name] for name in names if name in self._mapping})


def ignored_message(values: Mapping[str, str]) -> str:
    """A line for the log about variables that were ignored, with their values; empty without any."""
    assignments = ", ".join(f"{name}={value}" for name, value in values.items())
    return f"ignoring {assignments}: hpctrain can't parse this, and doesn't need it" if assignments else ""


def is_loopback(address: str) -> bool:
    """Whether an address reaches only the node itself."""
    return address in {"localhost", "::1"} or address.startswith("127.")


def without_job_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """`variables` without those that SLURM, submitit, torchrun and MPI launchers set for the processes of a job.

    A user's own defaults, such as `SBATCH_ACCOUNT`, are removed as well: `config.cluster` has read them already.
    """
    # sbatch and srun take many of these as options, so they would reach the new job
    return {name: value for name, value in variables.items() if name in _PASSED_ON or not _OF_A_JOB.fullmatch(name)}

"""The SLURM job around this process, and the place of a task that srun started."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster.variables import Place, Variables, is_loopback
from hpctrain.errors import ClusterEnvironmentError

_TERM = re.compile(r"(?:[A-Za-z0-9_.-]|\[[^\[\]]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
_MOST_NODES = 65536  # SLURM's own bound on a range; it prevents a mistyped list from filling the memory
_FIRST_SPECIAL_STEP = 4294967280  # from here up: the batch script, external and interactive steps (slurm.h)
_STEP_ID = re.compile(r"-?[0-9]+")
_TITLE_OF_SCRIPT = re.compile(rb"slurmstepd: \[\d+\.[a-z]")  # such as [77.batch]; a step of srun is [77.0]
_BECAUSE = "SLURM_STEP_ID"
_UNSET = "unset the ones that another step or shell exported"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVariables:
    """The SLURM job, if any, that this process belongs to."""

    job_id: str | None = None
    """As users type it: `12`, or `12_3` for a task of an array."""
    number: int = 0
    """The number of the job itself; each task of an array has its own."""
    array_task: int | None = None
    restart_count: int = 0
    step_id: str | None = None
    """Id of the srun step that this process is a task of; None in a batch script or a shell."""

    @classmethod
    def read(cls, variables: Variables) -> JobVariables:
        """Read the variables that SLURM sets in batch scripts, allocations and steps."""
        number = variables.number("SLURM_JOB_ID")
        if number is None:
            return cls()
        array = variables.number("SLURM_ARRAY_JOB_ID")
        task = variables.number("SLURM_ARRAY_TASK_ID")
        return cls(
            job_id=str(number) if array is None or task is None else f"{array}_{task}",
            number=number,
            array_task=task,
            restart_count=variables.number("SLURM_RESTART_COUNT") or 0,  # unset on the first run
            step_id=variables.text("SLURM_STEP_ID") if in_step(variables) else None,
        )

    @property
    def step_number(self) -> int:
        """A number that all ranks of the step share: that of the step, or 0 if it has none."""
        return int(self.step_id) if self.step_id is not None and self.step_id.isdecimal() else 0


def has_step_id(variables: Variables) -> bool:
    """Whether SLURM_STEP_ID is set, and a number. Batch scripts and shells may have one, too."""
    step = variables.text("SLURM_STEP_ID")
    if step is None or _STEP_ID.fullmatch(step):
        return step is not None
    variables.ignore("SLURM_STEP_ID")
    return False


def in_step(variables: Variables) -> bool:
    """Whether srun started this process as one of a step's tasks, and not as an interactive shell."""
    step = variables.text("SLURM_STEP_ID")
    if step is None:
        return False
    if not has_step_id(variables):
        # SLURM_STEP_NUM_TASKS is unset in a batch script, and 1 in the shell of an allocation
        return variables.may_exceed_one("SLURM_STEP_NUM_TASKS")
    # SLURM 26.05 prints it as a signed number: -5 in a batch script, where older versions print 4294967291
    if int(step) % 2**32 >= _FIRST_SPECIAL_STEP:
        return False
    if variables.text("SLURM_PTY_PORT") is None:
        return True
    # A shell from `srun --pty` has SLURM_PTY_PORT, and so has every step and every job that is started from it. SLURM
    # 22.05 tells them apart by another variable, 24.11 by none. A step of one task is taken for a shell, which makes no
    # difference to its place.
    return variables.may_exceed_one("SLURM_STEP_NUM_TASKS") and not _is_shell(variables.number("SLURM_TASK_PID"))


def _is_shell(task: int | None) -> bool:
    """Whether a task is the shell of `srun --pty`, or a batch script that was submitted from there.

    Only the shell has a terminal (login_tty in slurmstepd's mgr.c), and slurmstepd's title names the step.

    Args:
        task: the process id of the task, which slurmstepd started.
    """
    try:
        # proc(5): the name, in parentheses, may hold anything; then state, ppid, pgrp, session, tty_nr
        status = Path(f"/proc/{task}/stat").read_text(errors="replace").rpartition(")")[2].split()
        if status[4] != "0":
            return True
        return _TITLE_OF_SCRIPT.match(Path(f"/proc/{status[1]}/cmdline").read_bytes()) is not None
    except OSError:  # the variable is unset, or this is a container with process ids of its own
        return False


def job_nodes(variables: Variables) -> tuple[str, ...]:
    """The names of the nodes of the step, or of the job if there is no step; empty outside an allocation.

    Also empty if they can't be parsed.
    """
    name = "SLURM_STEP_NODELIST" if in_step(variables) else "SLURM_JOB_NODELIST"
    value = variables.text(name)
    try:
        return () if value is None else tuple(expand_nodelist(value, variable=name))
    except ClusterEnvironmentError:
        variables.ignore(name)
        return ()


def needed_job_nodes(variables: Variables) -> tuple[str, ...]:
    """Like `job_nodes`, for a batch script, which starts tasks on them.

    Raises:
        ClusterEnvironmentError: they can't be parsed.
    """
    text = variables.needed_text("SLURM_JOB_NODELIST", "SLURM_JOB_ID")
    return tuple(expand_nodelist(text, variable="SLURM_JOB_NODELIST"))


def task_cpus(variables: Variables, local_world_size: int) -> int | None:
    """Cores that SLURM allocated to a task; None if it is unknown.

    Args:
        variables: of the task.
        local_world_size: tasks of the step on this node.
    """
    if per_task := variables.number("SLURM_CPUS_PER_TASK"):
        return per_task
    on_node = variables.number("SLURM_CPUS_ON_NODE")
    return max(1, on_node // local_world_size) if on_node else None


def own_node(variables: Variables) -> str | None:
    """SLURM's name for this process's node, which may differ from the host name; None outside of SLURM."""
    return variables.text("SLURMD_NODENAME")


def has_one_task_per_node(variables: Variables) -> bool:
    """Whether each node of the step has one task, or SLURM_STEP_TASKS_PER_NODE is unset or can't be parsed."""
    counts = variables.text("SLURM_STEP_TASKS_PER_NODE")
    try:
        return counts is None or set(tasks_per_node(counts)) == {1}
    except ClusterEnvironmentError:
        variables.ignore("SLURM_STEP_TASKS_PER_NODE")
        return True


def place(variables: Variables) -> Place:
    """The place of a step's task.

    Raises:
        ClusterEnvironmentError: variables are missing or contradict each other.
    """
    rank = variables.needed_number("SLURM_PROCID", _BECAUSE)
    local_rank = variables.needed_number("SLURM_LOCALID", _BECAUSE)
    node_rank = variables.needed_number("SLURM_NODEID", _BECAUSE)
    # not SLURM_NTASKS: in a step of an interactive allocation that is still the allocation's
    world_size = variables.needed_number("SLURM_STEP_NUM_TASKS", _BECAUSE)
    variables.require_below("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    text = variables.needed_text("SLURM_STEP_TASKS_PER_NODE", _BECAUSE)
    counts = tasks_per_node(text, variable="SLURM_STEP_TASKS_PER_NODE")
    if sum(counts) != world_size:
        problem = f"expected SLURM_STEP_NUM_TASKS to be the sum of SLURM_STEP_TASKS_PER_NODE; {_UNSET}"
        raise variables.error(problem, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")
    if node_rank >= len(counts) or local_rank >= counts[node_rank]:
        problem = f"expected SLURM_NODEID and SLURM_LOCALID to be a place in SLURM_STEP_TASKS_PER_NODE; {_UNSET}"
        raise variables.error(problem, "SLURM_NODEID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    names = _names(variables, len(counts))
    _refuse_loopback(variables, len(counts))
    # local ranks follow the order of ranks: if both numbers are equal, ranks 0 to `rank` are all on this node
    rank_zero_node = names[node_rank] if names and rank == local_rank else None
    addresses = _addresses(variables, names[:1] if _follows_node_list(variables) else names, rank_zero_node)
    return Place(
        rank=rank,
        local_rank=local_rank,
        node_rank=node_rank,
        world_size=world_size,
        local_world_size=counts[node_rank],
        num_nodes=len(counts),
        master_addr=addresses[0],
        address_candidates=addresses,
        nodes=names,
    )


def _names(variables: Variables, num_nodes: int) -> tuple[str, ...]:
    """The names of the step's nodes; empty if they can't be parsed, and aren't needed."""
    try:
        text = variables.needed_text("SLURM_STEP_NODELIST", _BECAUSE)
        names = tuple(expand_nodelist(text, variable="SLURM_STEP_NODELIST"))
        if len(names) != num_nodes:
            problem = "expected SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE to list the same number of nodes"
            raise variables.error(f"{problem}; {_UNSET}", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
    except ClusterEnvironmentError:
        if num_nodes > 1 and variables.text("MASTER_ADDR") is None:
            raise
        if variables.text("SLURM_STEP_NODELIST") is not None:
            variables.ignore("SLURM_STEP_NODELIST")
        return ()
    return names


def _refuse_loopback(variables: Variables, num_nodes: int) -> None:
    master_addr = variables.text("MASTER_ADDR")
    if master_addr is not None and num_nodes > 1 and is_loopback(master_addr):
        raise variables.error(
            "expected MASTER_ADDR to reach rank zero from every node of SLURM_STEP_NODELIST, got a loopback address; "
            "unset MASTER_ADDR",
            *("MASTER_ADDR", "SLURM_STEP_NODELIST"),
        )


def _addresses(variables: Variables, names: tuple[str, ...], rank_zero_node: str | None) -> tuple[str, ...]:
    """The nodes on which rank zero may be, the likeliest first.

    Args:
        variables: of this process.
        names: of the nodes that come into question.
        rank_zero_node: this process's node, if rank zero is there; None if that isn't known.
    """
    if (master_addr := variables.text("MASTER_ADDR")) is not None:
        return (master_addr,)
    return (rank_zero_node,) if rank_zero_node is not None else names or ("127.0.0.1",)


def _follows_node_list(variables: Variables) -> bool:
    """Whether rank zero is certainly on the first node of the step's list."""
    distribution = variables.text("SLURM_DISTRIBUTION") or ""
    if distribution.startswith(("arbitrary", "cyclic", "plane")):
        return not distribution.startswith("arbitrary")
    # Block distribution put it there, too, before SLURM 26.05. Since then its tasks follow the switches
    # (_task_layout_topo in slurm_step_layout.c): with n3 and n4 on the first switch, ranks 0 to 7 of `-N4` on n[1-4]
    # were on n3 n3 n4 n4 n1 n1 n2 n2. No variable names the node, and `sattach --layout` is missing in containers.
    # SLURM_TOPOLOGY_ADDR_PATTERN shows only the switches of the cluster's default topology, so versions that are about
    # as new, with a SLUID, are in doubt too.
    has_switches = "." in (variables.text("SLURM_TOPOLOGY_ADDR_PATTERN") or "")
    return not has_switches and variables.text("SLURM_JOB_SLUID") is None


def expand_nodelist(nodelist: str, *, variable: str = "nodelist") -> list[str]:
    """Expand a list such as `rack[01-02]n[1-2],login` into node names, in its order, duplicates included.

    Equal to `scontrol show hostnames`, but needs no SLURM on this machine. Numbers are zero-padded to the width of the
    range's start. ClusterShell would sort the nodes, whose order decides which ranks a node gets; python-hostlist is
    under the GPL.

    Args:
        nodelist: the list as SLURM writes it.
        variable: the variable that holds it, for the error.

    Raises:
        ClusterEnvironmentError: the list can't be read.
    """
    names: list[str] = []
    for term in _terms(nodelist, variable):
        choices = [
            _numbers(inside, nodelist, variable) if inside or not literal else [literal]
            for inside, literal in _PIECE.findall(term)
        ]
        if len(names) + math.prod(map(len, choices)) > _MOST_NODES:
            raise _unreadable(nodelist, f"more than {_MOST_NODES} nodes", variable)
        names += ("".join(parts) for parts in itertools.product(*choices))
    return names


def tasks_per_node(text: str, *, variable: str = "tasks_per_node") -> list[int]:
    """Parse the number of tasks on each node from SLURM's `2(x3),1`.

    Raises:
        ClusterEnvironmentError: the text can't be read.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None or int(match[2] or 1) > _MOST_NODES:
            problem = f"expected {variable} to read like 2(x3),1; start the ranks with srun, or unset {variable}"
            raise ClusterEnvironmentError(problem, {variable: text})
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _terms(nodelist: str, variable: str) -> list[str]:
    """Split a list at the commas outside brackets."""
    # a comma inside brackets separates numbers: it is followed by a closing bracket before any opening one
    terms = re.split(r",(?![^\[\]]*\])", nodelist)
    for term in terms:
        if not _TERM.fullmatch(term):
            raise _unreadable(nodelist, f"{term!r} is not a node name", variable)
    return terms


def _numbers(inside: str, nodelist: str, variable: str) -> list[str]:
    """Expand the numbers of one bracket, such as `000-002,7`."""
    numbers: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _unreadable(nodelist, f"{part!r} is not a range of numbers", variable)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _unreadable(nodelist, f"the range {part} runs backwards", variable)
        if int(last) - int(first) >= _MOST_NODES:
            raise _unreadable(nodelist, f"more than {_MOST_NODES} nodes", variable)
        numbers += (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
    return numbers


def _unreadable(nodelist: str, problem: str, variable: str) -> ClusterEnvironmentError:
    return ClusterEnvironmentError(
        f"expected {variable} to be a node list such as rack[01-02]n[1-2], but {problem}; "
        f"start the ranks with srun, or unset {variable}",
        {variable: nodelist},
    )

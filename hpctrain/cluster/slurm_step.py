"""The SLURM job around this process, and the place of a task that srun started."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster import nodelist
from hpctrain.cluster.variables import Place, Variables, is_loopback

_FIRST_SPECIAL_STEP = 4294967280  # from here up: the batch script, external and interactive steps
_TITLE_OF_SCRIPT = re.compile(rb"slurmstepd: \[\d+\.[a-z]")  # such as [77.batch]; a step of srun is [77.0]
_BECAUSE = "SLURM_STEP_ID"
_UNSET = "unset the ones that another step or shell exported"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """The SLURM job, if any, that this process belongs to."""

    job_id: str | None = None
    """As users type it: `12`, or `12_3` for a task of an array."""
    number: int = 0
    """The number of the job itself; each task of an array has its own."""
    array_task: int | None = None
    restart_count: int = 0
    step_id: str | None = None

    @classmethod
    def read(cls, variables: Variables) -> SlurmJob:
        """Read the variables that SLURM sets in batch scripts, allocations and steps."""
        number = variables.number("SLURM_JOB_ID")
        if number is None:
            return cls()
        array = variables.text("SLURM_ARRAY_JOB_ID")
        task = variables.number("SLURM_ARRAY_TASK_ID")
        return cls(
            job_id=str(number) if array is None or task is None else f"{array}_{task}",
            number=number,
            array_task=task,
            restart_count=variables.number("SLURM_RESTART_COUNT") or 0,  # unset on the first run
            step_id=variables.text("SLURM_STEP_ID") if in_step(variables) else None,
        )


def in_step(variables: Variables) -> bool:
    """Whether srun started this process as one of a step's tasks, and not as an interactive shell."""
    step = variables.number("SLURM_STEP_ID")
    if step is None or step >= _FIRST_SPECIAL_STEP:
        return False
    if variables.text("SLURM_PTY_PORT") is None:
        return True
    # A shell from `srun --pty` has SLURM_PTY_PORT, and so has every step and every job that is started from it. SLURM
    # 22.05 tells them apart by another variable, 24.11 by none. A step of one task is taken for a shell, which makes no
    # difference to its place.
    return (variables.number("SLURM_STEP_NUM_TASKS") or 1) > 1 and not _is_shell(variables.number("SLURM_TASK_PID"))


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
    """The names of the nodes of the step, or of the job if there is no step; empty outside an allocation."""
    name = "SLURM_STEP_NODELIST" if in_step(variables) else "SLURM_JOB_NODELIST"
    value = variables.text(name)
    return () if value is None else tuple(nodelist.expand(value, variable=name))


def own_node(variables: Variables) -> tuple[str, ...]:
    """The name of this process's node, if SLURM started the process."""
    name = variables.text("SLURMD_NODENAME")
    return () if name is None else (name,)


def step_nodes(variables: Variables) -> tuple[tuple[str, ...], list[int]]:
    """The names of the step's nodes, and the number of tasks on each."""
    names = variables.needed_text("SLURM_STEP_NODELIST", _BECAUSE)
    counts = variables.needed_text("SLURM_STEP_TASKS_PER_NODE", _BECAUSE)
    return (
        tuple(nodelist.expand(names, variable="SLURM_STEP_NODELIST")),
        nodelist.tasks_per_node(counts, variable="SLURM_STEP_TASKS_PER_NODE"),
    )


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
    names, counts = step_nodes(variables)
    _refuse_contradiction(variables, names, counts)
    if node_rank >= len(counts) or local_rank >= counts[node_rank]:
        raise variables.error(
            f"expected SLURM_NODEID and SLURM_LOCALID to be a place in SLURM_STEP_TASKS_PER_NODE; {_UNSET}",
            *("SLURM_NODEID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
        )
    return Place(
        rank=rank,
        local_rank=local_rank,
        node_rank=node_rank,
        world_size=world_size,
        local_world_size=counts[node_rank],
        num_nodes=len(counts),
        master_addr=_master_addr(variables, names),
        nodes=names,
    )


def _refuse_contradiction(variables: Variables, names: tuple[str, ...], counts: list[int]) -> None:
    if len(names) != len(counts):
        raise variables.error(
            f"expected SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE to list the same number of nodes; {_UNSET}",
            *("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"),
        )
    if sum(counts) != variables.number("SLURM_STEP_NUM_TASKS"):
        raise variables.error(
            f"expected SLURM_STEP_NUM_TASKS to be the sum of SLURM_STEP_TASKS_PER_NODE; {_UNSET}",
            *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
        )


def _master_addr(variables: Variables, nodes: tuple[str, ...]) -> str:
    given = variables.text("MASTER_ADDR")
    if given is None:
        return nodes[0]  # block and cyclic distribution both put rank zero there
    if len(nodes) > 1 and is_loopback(given):
        raise variables.error(
            "expected MASTER_ADDR to reach rank zero from every node of SLURM_STEP_NODELIST, got a loopback address; "
            "unset MASTER_ADDR",
            *("MASTER_ADDR", "SLURM_STEP_NODELIST"),
        )
    return given

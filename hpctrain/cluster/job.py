"""The SLURM job around this process, if any."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.cluster import nodelist
from hpctrain.cluster.variables import Variables

_FIRST_SPECIAL_STEP = 4294967280  # from here up: the batch script, external and interactive steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The SLURM job, if any, that this process belongs to."""

    job_id: str | None = None
    """As users type it: `12`, or `12_3` for a task of an array."""
    number: int = 0
    """Of the job itself; the tasks of an array have numbers of their own."""
    array_task: int | None = None
    restart_count: int = 0
    step_id: str | None = None

    @classmethod
    def read(cls, variables: Variables) -> Job:
        """From the variables that SLURM sets in the batch script, in allocations and in steps."""
        number = variables.number("SLURM_JOB_ID")
        if number is None:
            return cls()
        array, task = variables.text("SLURM_ARRAY_JOB_ID"), variables.number("SLURM_ARRAY_TASK_ID")
        return cls(
            job_id=str(number) if array is None or task is None else f"{array}_{task}",
            number=number,
            array_task=task,
            restart_count=variables.number("SLURM_RESTART_COUNT") or 0,
            step_id=variables.text("SLURM_STEP_ID") if in_step(variables) else None,
        )


def in_step(variables: Variables) -> bool:
    """Whether srun started this process as one of a step's tasks, and not as a shell for a person.

    A shell has `SLURM_PTY_PORT`, but so has every step that is started from it: what tells them apart is that srun
    inside an allocation leaves `SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0`. A step of one task is taken for a shell then,
    which makes no difference to its place. Source: SLURM 21.08 to 26.05, `src/srun/.../srun_job.c`, `_set_env_vars`.
    """
    step = variables.number("SLURM_STEP_ID")
    if step is None or step >= _FIRST_SPECIAL_STEP:
        return False
    if variables.text("SLURM_PTY_PORT") is None:
        return True
    nested = variables.text("SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0") is not None
    return nested and (variables.number("SLURM_STEP_NUM_TASKS") or 1) > 1


def job_nodes(variables: Variables) -> tuple[str, ...]:
    """The names of the nodes of the job, or of the step where there is one; empty outside an allocation."""
    name = "SLURM_STEP_NODELIST" if in_step(variables) else "SLURM_JOB_NODELIST"
    value = variables.text(name)
    return () if value is None else tuple(nodelist.expand(value, variable=name))


def own_node(variables: Variables) -> tuple[str, ...]:
    """The name of the node that this process is on, where SLURM started it."""
    name = variables.text("SLURMD_NODENAME")
    return () if name is None else (name,)

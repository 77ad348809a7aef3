"""The arrays in which many tasks are submitted: as few as SLURM's MaxArraySize allows."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.errors import ConfigError, HpctrainError, SchedulerError
from hpctrain.run.directory import RunDirectory
from hpctrain.scheduler.slurm import Slurm

DEFAULT_LARGEST = 1001
"""Tasks of an array where SLURM can't be asked: MaxArraySize, unless a site changes it."""


@dataclass(frozen=True, slots=True)
class TaskArray:
    """Tasks that one sbatch command submits, as an array or as a job.

    Attributes:
        tasks: their positions among all tasks of the command.
        max_parallel: how many of them may run at the same time.
    """

    tasks: Sequence[int]
    max_parallel: int


def task_arrays(groups: Sequence[Sequence[int]], max_parallel: int | None, largest: int) -> list[TaskArray]:
    """Cut groups of tasks into arrays of about the same size, and share out how many tasks may run at the same time.

    Args:
        groups: positions of tasks that request the same from SLURM.
        max_parallel: tasks of all groups that may run at the same time; None for no limit. With more arrays than that,
            each of them runs one task at a time.
        largest: tasks that an array may have.
    """
    parts = [part for group in groups for part in _parts(group, largest)]
    shares = _shares([len(part) for part in parts], max_parallel)
    return [TaskArray(part, share) for part, share in zip(parts, shares, strict=True)]


def largest_array(num_tasks: int) -> int:
    """How many tasks an array may have on this cluster; SLURM is asked once, and not for a single task.

    Args:
        num_tasks: that are to be submitted.
    """
    if num_tasks < 2:
        return 1
    try:
        return _asked(os.environ.get("PATH"), os.environ.get("SLURM_CONF"))
    except SchedulerError:
        return DEFAULT_LARGEST


def not_submitted(count: int, total: int, noun: str, home: RunDirectory, error: HpctrainError) -> str:
    """The message on a submission of which SLURM refused a part.

    Args:
        count: what wasn't submitted.
        total: what was to be submitted.
        noun: what is counted, such as `run`.
        home: the sweep's folder.
        error: the refusal.
    """
    why = error.problem if isinstance(error, ConfigError) else str(error)
    resume = f"python -m hpctrain resume {home.as_typed}"
    return f"{count} of {total} {noun}s could not be submitted: {why}; to submit the rest later: {resume}"


def print_excess(limit: int | None, num_arrays: int) -> None:
    """Print a line if more tasks run at the same time than the user asked for, since no array can run none.

    Args:
        limit: cluster.max_parallel_runs.
        num_arrays: that share it.
    """
    if limit is not None and num_arrays > limit:
        print(
            f"cluster.max_parallel_runs={limit}: each of {num_arrays} arrays runs one at a time, so up to {num_arrays} "
            "run at the same time"
        )


@functools.cache
def _asked(_path: str | None, _conf: str | None) -> int:
    """Ask the SLURM that these environment variables choose."""
    return Slurm().largest_array()


def _parts(group: Sequence[int], largest: int) -> list[Sequence[int]]:
    # of about the same size, since each gets a share of what may run at the same time
    count = math.ceil(len(group) / largest)
    ends = [len(group) * number // count for number in range(count + 1)]
    return [group[first:last] for first, last in itertools.pairwise(ends)]


def _shares(sizes: Sequence[int], limit: int | None) -> list[int]:
    if limit is None or limit >= sum(sizes):
        return list(sizes)
    shares = [1] * len(sizes)
    for _ in range(limit - len(sizes)):
        neediest = max(range(len(sizes)), key=lambda number: sizes[number] / shares[number])
        shares[neediest] += 1
    return shares

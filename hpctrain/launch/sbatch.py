"""Run sbatch: split tasks into arrays, read the job id, classify refusals.

submitit's own call of sbatch has no timeout, and its errors don't show whether a job was submitted.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster.variables import without_job_variables
from hpctrain.config.gpu_request import GpuRequest
from hpctrain.errors import ConfigError, HpctrainError, SchedulerError, SchedulerMissingError
from hpctrain.phrases import all_of, either, listed, numbered
from hpctrain.run.directory import RunDirectory
from hpctrain.scheduler.slurm import Slurm

USER_MISTAKES = ("invalid", "not permitted", "more processors", "not available", "unavailable", "unrecognized", "limit")
"""Parts of sbatch's error messages that mean that the request itself was wrong."""

SUBMIT_LIMIT = "submitjob"
"""Part of the names of SLURM's limits on the jobs in the queue: QOSMaxSubmitJobPerUserLimit, AssocMaxSubmitJobLimit,
AssocGrpSubmitJobsLimit, ..."""
LIMIT_NAME = re.compile(r"\b(?:qos|assoc|max)[a-z]+\b")
"""A limit's name in lower case, which sbatch prints before the policy that all of them share."""
POLICY = "job submit limit"
"""Part of that policy: "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"."""
QUEUE_FULL = "submission failed: resource temporarily unavailable"
"""sbatch's message if the controller has MaxJobCount jobs, after it has tried for two minutes."""
NO_NODES = "node configuration is not available"
"""Part of sbatch's message if no nodes fit the request: with an unknown type of GPU, but also with too many nodes."""
SBATCH_TIMEOUT_S = 180.0
"""Seconds that sbatch may take: longer than a failover of the controller, `SlurmctldTimeout`, 120 s by default."""
MISSING = (
    "cluster=slurm: expected an executable sbatch on this machine; run the command on a login node of the cluster, "
    "or see the script with cluster.dry_run=true"
)
DEFAULT_LARGEST = 1001
"""Tasks of an array where SLURM can't be asked: MaxArraySize, unless a site changes it."""


class DependencyRefusedError(SchedulerError):
    """SLURM doesn't take the job's dependency on other jobs; nothing was submitted."""


class SubmitLimitError(ConfigError):
    """SLURM takes no more jobs of this user until some have ended."""


class NoSuchNodesError(ConfigError):
    """No nodes of the cluster satisfy the request, whatever else is in the queue."""


def require_sbatch() -> None:
    """Check for sbatch before anything is written.

    Raises:
        SchedulerMissingError: it isn't in PATH, or this user may not execute it.
    """
    if shutil.which("sbatch") is None:
        raise SchedulerMissingError(MISSING)


def sbatch(script: Path, name: str) -> str:
    """Submit a script; return the job's id, or the array's.

    Args:
        script: the file.
        name: of the job, for messages.

    Raises:
        ConfigError: SLURM refuses the request.
        SubmitLimitError: it has as many jobs of this user as it takes.
        NoSuchNodesError: it has no nodes for the request.
        DependencyRefusedError: it refuses the dependency on other jobs.
        SchedulerError: sbatch failed otherwise, and may have submitted the job.
    """
    try:
        done = _run_sbatch([str(script)])
    except subprocess.TimeoutExpired as error:
        raise _unsure(f"did not answer within {SBATCH_TIMEOUT_S:g} s", name) from error
    except KeyboardInterrupt as error:
        raise _unsure("was interrupted", name) from error
    if done.returncode:
        raise _refused(done, name)
    if (match := re.search(r"job (\d+)", done.stdout)) is None:
        raise _unsure(f'printed no job id: "{done.stdout.strip()}"', name)
    return match[1]


def is_accepted(script: str) -> bool:
    """Ask sbatch whether it would take a script for nodes that work now; nothing is submitted.

    Args:
        script: its text.

    Raises:
        SchedulerMissingError: sbatch can't be executed.
        SchedulerError: it didn't answer.
    """
    try:
        return _run_sbatch(["--test-only"], script).returncode == 0
    except subprocess.TimeoutExpired as error:
        raise SchedulerError(f"sbatch --test-only did not answer within {SBATCH_TIMEOUT_S:g} s") from error


def _run_sbatch(words: Sequence[str], script: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["sbatch", *words],
            env=without_job_variables(os.environ),
            input=script,
            capture_output=True,
            timeout=SBATCH_TIMEOUT_S,
            text=True,
            errors="replace",
            check=False,
        )
    except (FileNotFoundError, PermissionError) as error:
        raise SchedulerMissingError(MISSING) from error


def _refused(done: subprocess.CompletedProcess[str], name: str) -> ConfigError | SchedulerError:
    lines = done.stderr.strip().splitlines()
    text = "; ".join(line.split("error:")[-1].strip() for line in lines if "error:" in line) or " ".join(lines)
    lower = text.lower()
    # the controller may have accepted the job, and only its answer was lost
    if done.returncode < 0 or "timed out" in lower:
        code = done.returncode
        end = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return _unsure(f"{end}: {text}" if text else end, name)
    names_no_limit = POLICY in lower and LIMIT_NAME.search(lower) is None
    if SUBMIT_LIMIT in lower or QUEUE_FULL in lower or names_no_limit:
        remedy = "wait until some of your jobs have ended, or submit fewer runs"
        return SubmitLimitError("cluster", "slurm", f"SLURM takes no more of your jobs now: {text}", remedy)
    if "dependency" in lower:
        return DependencyRefusedError(f"sbatch refused the job's dependency: {text}")
    if any(mistake in lower for mistake in USER_MISTAKES):
        command = "sacctmgr show associations user=$USER" if "account" in lower else "sinfo"
        kind = NoSuchNodesError if NO_NODES in lower else ConfigError
        return kind("cluster", "slurm", f"sbatch refused the job: {text}", f"see `{command}` and cluster.*")
    return SchedulerError(f"sbatch failed: {text}; nothing was submitted")


def explain_gpus(error: NoSuchNodesError, gpus: GpuRequest, partition: str | None) -> ConfigError:
    """Explain a refused request of typed GPUs by the GPUs that the cluster has.

    Args:
        error: sbatch's refusal.
        gpus: that were requested.
        partition: the partitions of the request, separated by commas; None for the default one.
    """
    if not gpus.types:
        return error
    try:
        site = Slurm().gpus()
    except SchedulerError:
        return error
    here = site.of_partitions(partition)
    where = "the cluster" if partition is None else f"partition {partition}"
    for gpu_type in gpus.types:
        if gpu_type not in here.types:
            problem = f"is not a type of GPU that {where} has"
            remedies = [f"choose {either(here.descriptions)}" if here.types else "leave it out"]
            if others := site.partitions_of(gpu_type):
                remedies.append(f"set cluster.partition to {listed(others, separator=' or ')}")
            return gpus.unknown_type(gpu_type, problem, ", or ".join(remedies))

    def described(name: str) -> str:
        place = f" in {numbered('partition', here.partitions_of(name))}" if partition is None else ""
        return here.describe(name) + place

    has = all_of(list(map(described, gpus.types)))
    return ConfigError(error.key, error.value, error.problem, f"{where} has {has}: request fewer GPUs or nodes")


def _unsure(what: str, name: str) -> SchedulerError:
    # a job that has no number here can't train: submitit names the pickled call by the number, and the job needs it
    return SchedulerError(
        f"sbatch {what}; it may have submitted a job, which would fail at its start: look for it with `squeue --me "
        f"--name={name}`, cancel it with `scancel JOB`, and run the command again"
    )


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
    """The largest number of tasks of an array on this cluster; SLURM is asked once, and not for a single task.

    Args:
        num_tasks: that are to be submitted.
    """
    if num_tasks < 2:
        return 1
    try:
        return _ask_largest_array(os.environ.get("PATH"), os.environ.get("SLURM_CONF"))
    except SchedulerError:
        return DEFAULT_LARGEST


def describe_unsubmitted(count: int, total: int, noun: str, home: RunDirectory, error: HpctrainError) -> str:
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
def _ask_largest_array(_path: str | None, _conf: str | None) -> int:
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

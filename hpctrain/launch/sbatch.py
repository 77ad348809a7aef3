"""sbatch: its answer, and what its refusals mean."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from hpctrain.cluster.variables import scrubbed
from hpctrain.errors import ConfigError, SchedulerError, SchedulerMissingError

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
SBATCH_TIMEOUT_S = 180.0
"""Seconds that sbatch may take: longer than a failover of the controller, `SlurmctldTimeout`, 120 s by default."""
MISSING = (
    "cluster=slurm: expected an executable sbatch on this machine; run the command on a login node of the cluster, "
    "or see the script with cluster.dry_run=true"
)


class DependencyRefusedError(SchedulerError):
    """SLURM doesn't take the job's dependency on other jobs; nothing was submitted."""


class SubmitLimitError(ConfigError):
    """SLURM takes no more jobs of this user until some have ended."""


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
        DependencyRefusedError: it refuses the dependency on other jobs.
        SchedulerError: sbatch failed otherwise, and may have submitted the job.
    """
    try:
        done = subprocess.run(
            ["sbatch", str(script)],
            env=scrubbed(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SBATCH_TIMEOUT_S,
            text=True,
            errors="replace",
            check=False,
        )
    except (FileNotFoundError, PermissionError) as error:
        raise SchedulerMissingError(MISSING) from error
    except subprocess.TimeoutExpired as error:
        raise _unsure(f"did not answer within {SBATCH_TIMEOUT_S:g} s", name) from error
    except KeyboardInterrupt as error:
        raise _unsure("was interrupted", name) from error
    if done.returncode:
        raise _refused(done, name)
    if (found := re.search(r"job (\d+)", done.stdout)) is None:
        raise _unsure(f'printed no job id: "{done.stdout.strip()}"', name)
    return found[1]


def _refused(done: subprocess.CompletedProcess[str], name: str) -> ConfigError | SchedulerError:
    lines = done.stderr.strip().splitlines()
    text = "; ".join(line.split("error:")[-1].strip() for line in lines if "error:" in line) or " ".join(lines)
    # the controller may have accepted the job, and only its answer was lost
    if done.returncode < 0 or "timed out" in text.lower():
        code = done.returncode
        end = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return _unsure(f"{end}: {text}" if text else end, name)
    if _is_submit_limit(text.lower()):
        remedy = "wait until some of your jobs have ended, or submit fewer runs"
        return SubmitLimitError("cluster", "slurm", f"SLURM takes no more of your jobs now: {text}", remedy)
    if "dependency" in text.lower():
        return DependencyRefusedError(f"sbatch refused the job's dependency: {text}")
    if any(mistake in text.lower() for mistake in USER_MISTAKES):
        return ConfigError("cluster", "slurm", f"sbatch refused the job: {text}", "see `sinfo` and cluster.*")
    return SchedulerError(f"sbatch failed: {text}; nothing was submitted")


def _is_submit_limit(text: str) -> bool:
    if SUBMIT_LIMIT in text or QUEUE_FULL in text:
        return True
    return POLICY in text and LIMIT_NAME.search(text) is None


def _unsure(what: str, name: str) -> SchedulerError:
    # a job that has no number here can't train: submitit names the pickled call by the number, and the job needs it
    return SchedulerError(
        f"sbatch {what}; it may have submitted a job, which would fail at its start: look for it with `squeue --me "
        f"--name={name}`, cancel it with `scancel JOB`, and run the command again"
    )

"""Running a command of SLURM."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Mapping, Sequence

from hpctrain.errors import SchedulerError, SchedulerMissingError

_SETTINGS = ("SQUEUE_", "SACCT_", "SCONTROL_", "SCANCEL_")  # a person's filters and formats would change the answers
_UNREACHABLE = re.compile(
    r"unable to contact slurm controller|connection refused|timed out|configuration source|configuration file"
    r"|accounting storage is disabled|problem talking to the database|controller not responding"
    r"|zero bytes were transmitted|message (send|receive) failure|backup controller in standby",
    re.IGNORECASE,
)
_UNKNOWN_JOB = re.compile(r"invalid job id specified|job \S+ not found", re.IGNORECASE)


class UnknownJobError(SchedulerError):
    """SLURM doesn't know the job, or has forgotten it."""


def run(arguments: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> str:
    """What a command of SLURM prints, with times in seconds since the epoch and messages in English.

    Args:
        arguments: the command's name, found by the PATH of `environ`, and its arguments.
        environ: environment variables.
        timeout_s: it is killed after so many seconds.

    Raises:
        SchedulerMissingError: the command isn't there, or what it asks doesn't answer, or a signal ended it before:
            SLURM without cgroups sends those to all of a job's processes.
        UnknownJobError: it doesn't know the job.
        SchedulerError: it refused for another reason.
    """
    variables = {name: value for name, value in environ.items() if not name.startswith(_SETTINGS)}
    variables |= {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
    shown = " ".join(word for word in arguments if not word.startswith("--") or word.startswith("--jobs="))
    try:
        done = subprocess.run(
            arguments,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise SchedulerMissingError(
            f"expected SLURM's command {arguments[0]} in PATH: {error.strerror}; load SLURM's module or type this on a "
            "login node"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SchedulerMissingError(f"{shown}: SLURM did not answer within {timeout_s:g} s; try again later") from error
    if done.returncode == 0:
        return done.stdout
    if done.returncode < 0:
        raise SchedulerMissingError(f"{shown}: ended by {signal.Signals(-done.returncode).name}, without an answer")
    said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
    if _UNKNOWN_JOB.search(said):
        raise UnknownJobError(f"{shown}: {said}")
    if _UNREACHABLE.search(said):
        raise SchedulerMissingError(f"{shown}: {said}")
    raise SchedulerError(f"{shown}: {said}")

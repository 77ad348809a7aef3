"""Run SLURM's commands."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Mapping, Sequence

from hpctrain.errors import SchedulerError, SchedulerMissingError

# a user's filters and formats would change the answers
_SETTINGS = ("SQUEUE_", "SACCT_", "SCONTROL_", "SCANCEL_")
_UNREACHABLE = re.compile(
    r"unable to contact slurm controller|connection refused|timed out|configuration source|configuration file"
    r"|accounting storage is disabled|problem talking to the database|controller not responding"
    r"|zero bytes were transmitted|message (send|receive) failure|backup controller in standby",
    re.IGNORECASE,
)
_UNKNOWN_JOB = re.compile(r"invalid job id specified|job \S+ not found", re.IGNORECASE)


class UnknownJobError(SchedulerError):
    """SLURM doesn't know the job, or no longer remembers it."""


class SchedulerSilentError(SchedulerMissingError):
    """The command is installed, but SLURM didn't answer: a retry may help."""


def run(arguments: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> str:
    """Run one of SLURM's commands.

    Args:
        arguments: the command's name, found by the PATH of `environ`, and its arguments.
        environ: environment variables.
        timeout_s: seconds after which the command is killed.

    Returns:
        Its output, with times in seconds since the epoch and messages in English.

    Raises:
        SchedulerMissingError: the command isn't installed.
        SchedulerSilentError: the controller or the database didn't answer, or a signal ended the command.
        UnknownJobError: SLURM doesn't know the job.
        SchedulerError: SLURM rejected the command for another reason.
    """
    variables = {name: value for name, value in environ.items() if not name.startswith(_SETTINGS)}
    # the patterns above match English messages
    variables |= {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
    shown = " ".join(part for part in arguments if not part.startswith("--") or part.startswith("--jobs="))
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
            f"expected SLURM's command {arguments[0]} in PATH: {error.strerror}; load SLURM's module, or type this on "
            "a login node"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SchedulerSilentError(f"{shown}: SLURM did not answer within {timeout_s:g} s; try again later") from error
    if done.returncode:
        raise _failure(shown, done)
    return done.stdout


def _failure(shown: str, done: subprocess.CompletedProcess[str]) -> SchedulerError:
    if done.returncode < 0:
        # without cgroups SLURM signals every process of a job, including this command
        return SchedulerSilentError(f"{shown}: ended by {signal.Signals(-done.returncode).name}, without an answer")
    message = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
    if _UNKNOWN_JOB.search(message):
        return UnknownJobError(f"{shown}: {message}")
    if _UNREACHABLE.search(message):
        return SchedulerSilentError(f"{shown}: {message}")
    return SchedulerError(f"{shown}: {message}")

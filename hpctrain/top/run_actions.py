"""Cancel and resume a run for a user who watches it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from hpctrain.config.plain_yaml import read_plain_values
from hpctrain.errors import HpctrainError
from hpctrain.files import describe_os_error
from hpctrain.launch.cancellation import cancel
from hpctrain.run.directory import RunDirectory

RESUME_TIMEOUT_S = 300.0
"""Seconds that a submission may take: sbatch waits for a busy controller."""


def resume_command(directory: RunDirectory) -> str:
    """The command that continues a run, as it is typed."""
    return f"python -m hpctrain resume {directory.as_typed}"


def trains_here(directory: RunDirectory) -> bool:
    """Whether `resume` would train the run in its own process, and not submit a job."""
    return read_plain_values(directory.config, ["cluster.kind"]).get("cluster.kind") != "slurm"


def cancel_run(directory: RunDirectory) -> str:
    """Cancel a run; describe what was done, or why it isn't possible."""
    return _explained(lambda: _cancelled(directory))


def resume_run(directory: RunDirectory) -> str:
    """Submit a run to continue it, as the user would; return what the command printed."""
    if trains_here(directory):
        return f"It would train in this terminal. In another one, type:\n\n  {resume_command(directory)}"
    return _explained(lambda: _resumed(directory))


def _cancelled(directory: RunDirectory) -> str:
    warnings: list[str] = []
    done = cancel(directory, warnings.append)
    return "\n".join([*warnings, done])


def _resumed(directory: RunDirectory) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", "resume", os.fspath(directory.path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=RESUME_TIMEOUT_S,
        text=True,
        errors="replace",
        check=False,
        start_new_session=True,  # Ctrl-C in this terminal isn't meant for it
    )
    ended = f"\n(exit code {done.returncode})" if done.returncode else ""
    return (done.stdout.strip() or "it printed nothing") + ended


def _explained(act: Callable[[], str]) -> str:
    try:
        return act()
    except HpctrainError as error:
        return str(error)
    except OSError as error:
        return describe_os_error(error)
    except subprocess.TimeoutExpired as error:
        return f"no answer within {error.timeout:g} s; see `python -m hpctrain status`"

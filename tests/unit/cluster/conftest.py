"""Tasks of steps, as slurmstepd starts them: with a terminal, without one, and a batch script."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

SLEEP = "sleep 900"


@contextlib.contextmanager
def started_by(title: str) -> Iterator[dict[str, str]]:
    """The variable that names the step's task, which a process of this title starts."""
    argv = [title, "-c", f"{SLEEP} & echo $!; wait"]
    with subprocess.Popen(
        argv, executable="/bin/sh", start_new_session=True, stdout=subprocess.PIPE, text=True
    ) as stepd:
        assert stepd.stdout is not None
        task = stepd.stdout.readline().strip()
        yield {"SLURM_TASK_PID": task}
        os.killpg(stepd.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def terminal() -> Iterator[dict[str, str]]:
    """The variable that names the step's task, for one with a terminal."""
    held, given = os.openpty()
    argv = ["setsid", "--ctty", "sh", "-c", f"echo begun; exec {SLEEP}"]
    with subprocess.Popen(argv, stdin=given, stdout=given) as task:
        os.close(given)
        os.read(held, 1)  # now the terminal is its own
        yield {"SLURM_TASK_PID": str(task.pid)}
        task.kill()
    os.close(held)


@pytest.fixture(scope="session")
def no_terminal() -> Iterator[dict[str, str]]:
    """The same variable, for a task without a terminal."""
    with started_by("slurmstepd: [77.1]") as variable:
        yield variable


@pytest.fixture(scope="session")
def batch_script() -> Iterator[dict[str, str]]:
    """The same variable in a batch script."""
    with started_by("slurmstepd: [77.bat") as variable:  # SLURM 22.05 cuts its title off
        yield variable

"""Tasks of steps, as slurmstepd starts them: with a terminal, or in a session that has none."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def terminal() -> Iterator[dict[str, str]]:
    """The variable that names the step's task, a process with a terminal."""
    held, given = os.openpty()
    argv = ["setsid", "--ctty", "sh", "-c", "echo begun; exec sleep infinity"]
    with subprocess.Popen(argv, stdin=given, stdout=given) as task:
        os.read(held, 1)  # now the terminal is its own
        yield {"SLURM_TASK_PID": str(task.pid)}
        task.kill()
    os.close(given)
    os.close(held)


@pytest.fixture(scope="session")
def no_terminal() -> Iterator[int]:
    """The number of a process without a terminal."""
    with subprocess.Popen(["sleep", "infinity"], start_new_session=True) as task:
        yield task.pid
        task.kill()

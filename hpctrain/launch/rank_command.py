"""The command that starts a rank, here or on a node, and variables for it."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from hpctrain.config.cluster import Slurm
from hpctrain.launch.prepare import RunPlan
from hpctrain.run.code import CodeSnapshot
from hpctrain.run.import_path import python_path
from hpctrain.startup import is_found_here

IMAGE_PYTHON = "python3"
"""The Python of an image, by the name that all official ones give it."""


def rank_command(run: RunPlan, code: CodeSnapshot | None) -> list[str]:
    """Return the command of a rank, which the run directory follows.

    Args:
        run: the run.
        code: from which the rank imports; None for its working directory.
    """
    module = "hpctrain.program" if run.is_program else "hpctrain.train"
    safe = [] if code is None or is_found_here() else ["-P"]
    return [rank_python(run), *safe, "-u", "-m", module]


def rank_python(run: RunPlan) -> str:
    """Return the Python of the ranks: a path, or a name that is looked up in PATH; in a container, of that."""
    cluster = run.config.cluster
    if not isinstance(cluster, Slurm):
        return sys.executable
    return cluster.python or (sys.executable if cluster.container.image is None else IMAGE_PYTHON)


def code_variables(run: RunPlan, code: CodeSnapshot | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which a rank, and the processes that it starts, import a run's code.

    A rank of a program gets none: it makes those of the program.

    Args:
        run: the run.
        code: from which the rank imports; None for its working directory.
        environ: of the launcher.
    """
    return {} if code is None or run.is_program else {"PYTHONPATH": python_path(code, environ)}


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment variables of a local rank, which are those of torchrun."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }

"""Become a rank: the one door from the login half to the worker half."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from hpctrain.config.root import Config
from hpctrain.run.directory import RunDirectory


def run_rank(
    config: Config, directory: RunDirectory | None, make_directory: Callable[[], RunDirectory] | None = None
) -> int:
    """Be a rank of the run, to its end.

    Args:
        config: of the run.
        directory: the run directory, where it exists already.
        make_directory: makes it, on rank zero; the other ranks are told.

    Returns:
        An `ExitCode`.
    """
    os.environ.update(config.cluster.env)
    from hpctrain.worker.rank import main  # the one door to the worker half: what is above it never imports torch

    return main(config, directory, make_directory)


def end_process(code: int) -> None:
    """Leave at once: neither threads of a broken process group nor a write must keep a process that is over."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

"""``python -m hpctrain resume RUN``: go on with a run that stopped."""

from __future__ import annotations

import argparse
from pathlib import Path

from hpctrain.cli.status import read_statuses
from hpctrain.errors import RunDirectoryError
from hpctrain.run.directory import RunDirectory
from hpctrain.status.search import run_of
from hpctrain.status.state import RunState

EPILOG = """examples:
  python -m hpctrain resume runs/digits/2026-01-31_12-00-00
  python -m hpctrain resume RUN trainer.max_steps=2000        train longer
  python -m hpctrain resume RUN cluster=slurm nodes=2         go on somewhere else
"""


def main(arguments: list[str]) -> int:
    """Launch a run again, with its own configuration, from its newest intact checkpoint.

    Returns:
        An `ExitCode`.

    Raises:
        RunDirectoryError: there is no such run, or it is running.
        ConfigError: an override that can't work.
    """
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain resume",
        description="Go on with a run that stopped, where its newest intact checkpoint is.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", help="the run directory, or its name under the folder of runs")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="what to change")
    parser.add_argument("--config-dir", help="a folder with more configuration")
    parser.add_argument("--runs-dir", default="runs", metavar="FOLDER", help="the folder of runs (runs)")
    options = parser.parse_intermixed_args(arguments)
    directory = run_of(options.run, Path(options.runs_dir))
    refuse_running(directory)
    from hpctrain.launch.launcher import launch
    from hpctrain.launch.prepare import changed_config

    config = changed_config(directory, options.overrides, options.config_dir)
    return launch(config, ["python", "-m", "hpctrain", "resume", *arguments])


def refuse_running(directory: RunDirectory) -> None:
    """Keep a second attempt away from a run that goes on.

    Raises:
        RunDirectoryError: it is queued or running.
    """
    (status,) = read_statuses([directory])
    if status.state in (RunState.RUNNING, RunState.STARTING, RunState.QUEUED):
        remedy = f"end it first: `python -m hpctrain cancel {directory.as_typed}`"
        raise RunDirectoryError(f"{directory.path} is {status.state}; {remedy}")

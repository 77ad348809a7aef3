"""One run, launched where the configuration says."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hpctrain.config.checks import warnings_of
from hpctrain.config.cluster import Slurm
from hpctrain.config.resources import resources_of
from hpctrain.config.root import Config
from hpctrain.errors import ExitCode, HpctrainError
from hpctrain.launch.prepare import default_path, prepare
from hpctrain.run.directory import RunDirectory


def launch(config: Config, command: Sequence[str]) -> int:
    """Launch one run.

    Args:
        config: checked.
        command: the words that were typed, for the manifest.

    Returns:
        An `ExitCode`: the run's, or 0 once it is submitted.
    """
    for warning in warnings_of(config):
        print(f"hpctrain: warning: {warning}", file=sys.stderr)
    if config.cluster.dry_run:
        return dry_run(config)
    if not isinstance(config.cluster, Slurm):
        from hpctrain.launch.local import launch_local

        directory = prepare(config, command)
        print(f"run directory {directory.path}", flush=True)
        return launch_local(config, directory)
    return submit_run(config, command)


def submit_run(config: Config, command: Sequence[str]) -> int:
    """Submit one run to SLURM, and follow it where the configuration says so."""
    from hpctrain.launch.submission import submit

    directory = prepare(config, command)
    log = directory.rank_log(0)
    seen_bytes = log.stat().st_size if log.exists() else 0
    try:
        (job_id,) = submit([config], [directory], directory)
    except HpctrainError:
        discard_unstarted(directory)
        raise
    tell_submitted(job_id, directory)
    if not config.cluster.wait:
        return ExitCode.FINISHED
    from hpctrain.status.follow import wait_for

    try:
        return wait_for(directory, skip_bytes=seen_bytes)
    except KeyboardInterrupt:
        print(f"\nthe job goes on; to end it: python -m hpctrain cancel {directory.as_typed}")
        return ExitCode.INTERRUPTED


def tell_submitted(job_id: str, directory: RunDirectory) -> None:
    """Job id, run directory, and what to type next."""
    run = directory.as_typed
    print(
        f"submitted job {job_id}\n"
        f"run directory {directory.path}\n"
        f"  python -m hpctrain status {run}\n"
        f"  python -m hpctrain logs {run} --follow\n"
        f"  python -m hpctrain cancel {run}",
        flush=True,
    )


def dry_run(config: Config) -> int:
    """Print what would be launched."""
    assert config.name is not None
    directory = RunDirectory.at(config.run_dir or default_path(config.name))
    resources = resources_of(config)
    if isinstance(config.cluster, Slurm):
        from hpctrain.launch.submission import script

        print(script(config, directory))
        print(f"# nothing was submitted; the job would train with {resources.world_size} ranks in {directory.path}")
    else:
        print(f"nothing was launched; {resources.world_size} processes here would train in {directory.path}")
    return ExitCode.FINISHED


def discard_unstarted(directory: RunDirectory) -> None:
    """Remove a run directory for which nothing was ever submitted or started."""
    import shutil

    if not directory.job_records() and not directory.attempts.exists():
        shutil.rmtree(directory.path)

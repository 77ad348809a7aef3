"""Launch one run where its configuration says: on this machine, or as a SLURM job."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from hpctrain.config.checks import warnings_of
from hpctrain.config.cluster import Slurm
from hpctrain.config.root import Config
from hpctrain.errors import ExitCode, HpctrainError
from hpctrain.launch.prepare import RunPlan, default_path, discard_unstarted, plan, prepare
from hpctrain.launch.rollback import new_folders_removed_on_error, run_restored_on_error
from hpctrain.phrases import counted
from hpctrain.run.directory import RunDirectory
from hpctrain.status.report import RunStatus
from hpctrain.streams import ignore_write_errors


def launch(config: Config, command: Sequence[str]) -> int:
    """Launch one run.

    Args:
        config: checked.
        command: the command line as typed, for the manifest.

    Returns:
        An `ExitCode`: the run's, or 0 once it is submitted.
    """
    for warning in warnings_of(config):
        print(f"hpctrain: warning: {warning}", file=sys.stderr)
    if config.cluster.dry_run:
        print_plan(plan(config))
        return ExitCode.FINISHED
    place = Path(config.run_dir or default_path(str(config.name)))
    # a run that is at the default path already is another launch's, of the same second
    undo = run_restored_on_error(RunDirectory.at(place)) if config.run_dir else contextlib.nullcontext()
    with new_folders_removed_on_error(place), undo:
        if isinstance(config.cluster, Slurm):
            from hpctrain.launch.submission import require_commands

            require_commands("sbatch")
        run = prepare(config, command)
        if isinstance(config.cluster, Slurm):
            return _submit(run)
    return launch_here(run)


def launch_here(run: RunPlan) -> int:
    """Train on this machine and wait for the end; return an `ExitCode`."""
    from hpctrain.launch.local import launch_local  # imports much of the worker, which submitting doesn't need

    ignore_write_errors()
    print(f"run directory {run.directory.path}", flush=True)
    return launch_local(run)


def print_completed(status: RunStatus, config: Config) -> None:
    """Print that nothing is left to train, and how to train on."""
    directory = RunDirectory(status.path)
    length = "max_epochs" if config.trainer.max_steps is None else "max_steps"
    print(f"{directory.path}: already completed, at step {status.step}")
    print(f"  python -m hpctrain resume {directory.as_typed} trainer.{length}=N    # to train longer")


def print_plan(run: RunPlan, varied: str = "") -> None:
    """Print what would be launched; ``varied`` is what the run's sweep varies, with its values."""
    ranks, path = run.resources.world_size, run.directory.path
    if isinstance(run.config.cluster, Slurm):
        from hpctrain.launch.submission import script

        print(script(run, run.directory))
        print(f"# nothing was submitted; the job would train with {counted(ranks, 'rank')} in {path}")
    else:
        processes = "1 process" if ranks == 1 else f"{ranks} processes"
        print(f"nothing was launched; {processes} here would train in {path}{varied and f' with {varied}'}")


def _submit(run: RunPlan) -> int:
    from hpctrain.launch.submission import submit  # submitit takes a tenth of a second to import

    directory = run.directory
    log = directory.rank_log(0)
    seen_bytes = log.stat().st_size if log.exists() else 0
    try:
        (job_id,) = submit([run], directory)
    except HpctrainError:
        discard_unstarted(directory)
        raise
    typed = directory.as_typed
    print(
        f"submitted job {job_id}\n"
        f"run directory {directory.path}\n"
        f"  python -m hpctrain status {typed}\n"
        f"  python -m hpctrain logs {typed} --follow\n"
        f"  python -m hpctrain cancel {typed}",
        flush=True,
    )
    if not run.config.cluster.wait:
        return ExitCode.FINISHED
    from hpctrain.status.follow import wait_for

    try:
        return wait_for(directory, skip_bytes=seen_bytes)
    except KeyboardInterrupt:
        print(f"\nthe job continues; to cancel it: python -m hpctrain cancel {typed}")
        return ExitCode.INTERRUPTED

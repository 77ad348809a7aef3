"""Launch one run on this machine or as a SLURM job, as its configuration has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hpctrain.config.checks import warnings_of
from hpctrain.config.cluster import Slurm
from hpctrain.config.root import RunConfig
from hpctrain.errors import ExitCode, RunDirectoryError
from hpctrain.launch.after import require_others, start_options
from hpctrain.launch.existing_run import nothing_left, print_completed, revert_failed_changes
from hpctrain.launch.launch_code import LaunchCode, importing_code_of
from hpctrain.launch.prepare import RunPlan, default_path, plan, prepare, refuse_other_files, rollback_on_error
from hpctrain.launch.sbatch import require_sbatch
from hpctrain.phrases import counted
from hpctrain.run.directory import RunDirectory
from hpctrain.run.gone_checkpoints import describe_gone
from hpctrain.run.reason import Reason
from hpctrain.status.before_launch import require_stopped
from hpctrain.status.run_status import RunStatus
from hpctrain.streams import Printer, ignore_write_errors, print_warning


def launch(config: RunConfig, command: Sequence[str], *, force: bool = False, code_now: bool = False) -> int:
    """Launch one run, unless it has completed already; an error before the launch leaves it as it was, or absent.

    Args:
        config: checked.
        command: the command line as typed, for the manifest.
        force: launch an existing run although SLURM can't be asked whether its job is over.
        code_now: take today's code for an existing run, too.

    Returns:
        An `ExitCode`: the run's, or 0 once it is submitted, and for a completed run.

    Raises:
        RunDirectoryError: the run is running, or may be; or its directory can't be written.
    """
    if config.cluster.dry_run:
        for warning in warnings_of(config):
            print_warning(warning)
        print_plan(plan(config))
        return ExitCode.FINISHED
    prepared = prepare_launch(config, command, force=force, code_now=code_now)
    if isinstance(prepared, RunStatus):
        print_completed(prepared, config, code_now=code_now)
        return ExitCode.FINISHED
    return launch_here(prepared.run) if prepared.job_id is None else _report_and_wait(prepared)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedLaunch:
    """A launch whose run is prepared.

    Attributes:
        run: its plan; its directory exists.
        job_id: of the submitted job; None if the run is to train on this machine, which is left to the caller.
        seen_bytes: size of rank zero's log, from earlier attempts.
    """

    run: RunPlan
    job_id: str | None
    seen_bytes: int


def prepare_launch(
    config: RunConfig,
    command: Sequence[str],
    *,
    force: bool = False,
    code_now: bool = False,
    code_required: bool = True,
    report: Printer = print,
    warn: Printer = print_warning,
) -> PreparedLaunch | RunStatus:
    """Prepare a run and submit its job, if it has one; an error leaves the run as it was, or absent.

    Args:
        config: checked, without `cluster.dry_run`.
        command: the command line as typed, for the manifest.
        force: launch an existing run although SLURM can't be asked whether its job is over.
        code_now: take today's code for an existing run, too.
        code_required: refuse a run whose code can't be copied; False if this process has imported it already.
        report: gets lines about an existing run that continues.
        warn: gets lines about settings that are probably mistakes.

    Returns:
        The status of the run, if it has completed already.

    Raises:
        RunDirectoryError: the run is running, or may be; or its directory can't be written.
    """
    existing = None if config.run_dir is None else RunDirectory.at(config.run_dir)
    is_run = existing is not None and existing.config.is_file()
    if existing is not None and is_run:
        revert_failed_changes([existing], report)
        status = require_stopped(existing, force=force)
        if nothing_left(status, config):
            return status
        if not config.resume.from_scratch and (problem := describe_gone(existing)):
            raise RunDirectoryError(problem)
    elif existing is not None:
        refuse_other_files(existing)
    with importing_code_of(config.run_dir, now=code_now):
        warnings = warnings_of(config)
    for warning in warnings:
        warn(warning)
    if isinstance(config.cluster, Slurm):
        require_sbatch()
    require_others(config, existing or RunDirectory.at(default_path(str(config.name))))
    with rollback_on_error(config.run_dir, config.name, command) as directory:
        if existing is not None and existing.config.is_file() is not is_run:
            problem = "another command has just launched a run there; choose another run_dir"
            raise RunDirectoryError(f"{directory.path}: {problem}")
        log = directory.rank_log(0)
        seen_bytes = log.stat().st_size if log.exists() else 0
        code = LaunchCode(directory, now=code_now, required=code_required, warn=warn)
        run = prepare(dataclasses.replace(config, run_dir=str(directory.path)), command, report=report, code=code)
        job_id = None
        if isinstance(config.cluster, Slurm):
            from hpctrain.launch.submission import submit  # it imports submitit, which is slow

            (job_id,) = submit([run], run.directory)
    return PreparedLaunch(run=run, job_id=job_id, seen_bytes=seen_bytes)


def launch_here(run: RunPlan, *, quiet: Collection[Reason] = ()) -> int:
    """Train on this machine and wait for the end; return an `ExitCode`.

    Args:
        run: prepared.
        quiet: reasons for which the attempt may end without a message, because the caller has one.
    """
    from hpctrain.launch.local import launch_local  # imports much of the worker, which submitting doesn't need

    ignore_write_errors()
    print(f"run directory {run.directory.path}", flush=True)
    return launch_local(run, quiet=quiet)


def print_plan(run: RunPlan, varied: str = "") -> None:
    """Print what would be launched; ``varied`` is what the run's sweep varies, with its values."""
    ranks, path = run.resources.world_size, run.directory.path
    verb = "run" if run.is_program else "train"
    if isinstance(run.config.cluster, Slurm):
        from hpctrain.launch.submission import script

        print(script(run, run.directory, start=start_options(run.config)))
        fewest = run.node_counts[-1] * run.resources.processes_per_node
        number = counted(ranks, "rank") if fewest == ranks else f"{fewest} to {ranks} ranks"
        print(f"# nothing was submitted; the job would {verb} with {number} in {path}")
    else:
        processes = "1 process" if ranks == 1 else f"{ranks} processes"
        print(f"nothing was launched; {processes} here would {verb} in {path}{varied and f' with {varied}'}")


def _report_and_wait(prepared: PreparedLaunch) -> int:
    """Print what to type next after a submission; with `cluster.wait`, wait for the run's end."""
    run = prepared.run
    quoted_path = run.directory.as_typed
    print(
        f"submitted job {prepared.job_id}\n"
        f"run directory {run.directory.path}\n"
        f"  python -m hpctrain status {quoted_path}\n"
        f"  python -m hpctrain logs {quoted_path} --follow\n"
        f"  python -m hpctrain cancel {quoted_path}",
        flush=True,
    )
    if not run.config.cluster.wait:
        return ExitCode.FINISHED
    from hpctrain.status.follow import wait_for

    try:
        return wait_for(run.directory, skip_bytes=prepared.seen_bytes)
    except KeyboardInterrupt:
        print(f"\nthe job continues; to cancel it: python -m hpctrain cancel {quoted_path}")
        return ExitCode.INTERRUPTED

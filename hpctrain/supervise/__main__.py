"""The program of a batch script: ``python -m hpctrain.supervise RUN``, or ``... KEY=VALUE ...`` for a new run.

The new run is a training, or a program if ``-- COMMAND`` follows.
"""

# ruff: noqa: E402 - all imports come after the working directory is excluded, the slow ones after signals are blocked
from hpctrain.startup import exclude_working_directory

# only the ranks import the user's code; another user may own the folder, or it has a signal.py
exclude_working_directory()

import signal

from hpctrain.supervise.signals import WATCHED, catch_signals, ignore_signals, watch_signals

# a signal that arrives during the imports stays pending, even where the batch script ignores it
signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from hpctrain.cluster.environment import ClusterEnvironment, is_rank
from hpctrain.cluster.slurm_step import JobVariables
from hpctrain.cluster.variables import Variables
from hpctrain.config.cluster import Slurm as SlurmCluster
from hpctrain.config.gpu_request import GRES
from hpctrain.config.program import split_command
from hpctrain.config.resources import resources_of
from hpctrain.config.stored import load_run
from hpctrain.errors import ERROR_PREFIX, ClusterEnvironmentError, ConfigError, ExitCode, HpctrainError
from hpctrain.files import read_bytes
from hpctrain.launch.prepare import RunPlan, prepare_as_rank
from hpctrain.retry import retry
from hpctrain.run.directory import RunDirectory, umask_of
from hpctrain.run.ledger import Ledger
from hpctrain.run.sweep_record import sweep_is_over
from hpctrain.scheduler.slurm import Slurm
from hpctrain.streams import LogHandler, ignore_write_errors
from hpctrain.supervise.allocation import allocation_overrides
from hpctrain.supervise.job import forbid_requeue
from hpctrain.supervise.supervisor import STORAGE_ERRORS, STORAGE_S, Supervisor
from hpctrain.terminal import guard_output

COMMAND = "python -m hpctrain.supervise"

log = logging.getLogger("hpctrain.supervise")


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run attempts of a run in this allocation, until the run ends or continues elsewhere.

    Args:
        arguments: a run directory; or the overrides of a new run, which takes its resources from the allocation, and
            after `--` the command of a program.
        environ: the batch script's environment.

    Returns:
        The exit code for the batch script.
    """
    read_end = catch_signals()
    try:
        plan = plan_run(arguments, environ)
        os.umask(umask_of(plan.config.mode))
        log_to_stdout()
        if message := ClusterEnvironment.from_environment(environ).ignored_message:
            log.warning("%s", message)
        if not Ledger(plan.directory).last_claim() and sweep_is_over(plan.directory, time.time()):
            log.info("the time of the sweep is over (sweep.time_limit_min), so the run isn't started")
            return ExitCode.FINISHED
        supervisor = Supervisor(plan, environ, Slurm(environ))
        watch_signals(read_end, supervisor.job.check)
        return supervisor.run()
    except HpctrainError as error:
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
        # an error of the environment may mean that the job isn't one of hpctrain's
        job_id = JobVariables.read(Variables(environ)).job_id
        if job_id is not None and not isinstance(error, ClusterEnvironmentError):
            forbid_requeue(Slurm(environ), job_id)
        return error.exit_code


def plan_run(arguments: Sequence[str], environ: Mapping[str, str]) -> RunPlan:
    """Open the named run, or create a run from overrides; a requeued job finds the run that it created.

    Raises:
        HpctrainError: the configuration, the directory or the environment is invalid.
    """
    run_arguments, command = split_command(arguments)
    is_program = "--" in arguments
    parser = argparse.ArgumentParser(prog=COMMAND, description="Run a job's ranks, from its batch script.")
    parser.usage = f"{COMMAND} [-h] [--config-dir FOLDER] (RUN | [KEY=VALUE ...] [-- COMMAND ...])"
    parser.add_argument("--config-dir", "-cd", metavar="FOLDER", help="a folder with groups of your own")
    parser.add_argument("words", nargs="*", metavar="RUN | KEY=VALUE", help="a run directory, or a new run's overrides")
    options = parser.parse_intermixed_args(run_arguments)
    words: list[str] = options.words
    environment = ClusterEnvironment.from_environment(environ)
    if "SLURM_JOB_ID" in environment.unparsable:
        raise Variables(environ).error("expected SLURM_JOB_ID to be a whole number in a batch script", "SLURM_JOB_ID")
    if environment.job_id is None or is_rank(environ):
        elsewhere = "run cluster=slurm KEY=VALUE ... -- COMMAND" if is_program else "cluster=slurm KEY=VALUE ..."
        problem = f"{COMMAND} is for batch scripts; elsewhere type python -m hpctrain {elsewhere}"
        raise ClusterEnvironmentError(problem, {})
    if not is_program and len(words) == 1 and "=" not in words[0] and not words[0].startswith("~"):
        return _patiently(lambda: _open_run(words[0]), environment, "the run directory can't be read")
    # Hydra takes a tenth of a second to import, and a job that opens its run doesn't need it
    from hpctrain.config.compose import composer_of

    composer = composer_of(command if is_program else None, options.config_dir)
    try:
        config = composer.compose_run([*allocation_overrides(environ, words), *words])
    except ConfigError as error:
        if error.key != GRES:
            raise
        # of a site file, whose gres has the GPUs: only a composed configuration shows it
        config = composer.compose_run([*allocation_overrides(environ, words, with_gpus=False), *words])
    if not isinstance(config.cluster, SlurmCluster):
        raise ConfigError("cluster", config.cluster.kind, "isn't a SLURM cluster", "leave it out in a batch script")
    typed_words = [*COMMAND.split(), *arguments]
    return _patiently(
        lambda: prepare_as_rank(config, typed_words, environment, takes_code=True),
        environment,
        "the run directory can't be prepared",
    )


def _open_run(path: str) -> RunPlan:
    directory = RunDirectory.existing(path)
    read_bytes(directory.config)  # `load` would report an error of the file system as one of the configuration
    config = load_run(directory.config)
    return RunPlan(config, directory, resources_of(config))


def _patiently(act: Callable[[], RunPlan], environment: ClusterEnvironment, problem: str) -> RunPlan:
    """Call a function; in a requeued job, retry while the file system is unavailable.

    Raises:
        HpctrainError: it stayed unavailable.
    """
    try:
        # a requeued job has used its directory before, so a failure is probably temporary
        return retry(act, on=STORAGE_ERRORS, for_s=STORAGE_S, problem=problem) if environment.restart_count else act()
    except OSError as error:
        raise HpctrainError(f"{problem}: {error}") from error


def log_to_stdout() -> None:
    """Log into the batch script's log."""
    handler = LogHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("hpctrain")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def execute(program: Callable[[Sequence[str], Mapping[str, str]], int]) -> NoReturn:
    """Call the `main` of a batch script's program, and end the process with the exit code that it returns."""
    guard_output()
    ignore_write_errors()
    try:
        code = program(sys.argv[1:], os.environ)
    finally:
        ignore_signals()
    sys.exit(code)


if __name__ == "__main__":
    execute(main)

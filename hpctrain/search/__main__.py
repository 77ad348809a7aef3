"""The program of an array task of a search: ``python -m hpctrain.search SWEEP``."""

# ruff: noqa: E402 - all imports come after the working directory is excluded, the slow ones after signals are blocked
from hpctrain.startup import exclude_working_directory

# as in `hpctrain.supervise`
exclude_working_directory()

import signal

# a signal that arrives during the imports stays pending, even where the batch script ignores it
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))

import argparse
import sys
from collections.abc import Mapping, Sequence

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.errors import ERROR_PREFIX, ClusterEnvironmentError, ExitCode, HpctrainError
from hpctrain.files import describe_os_error
from hpctrain.run.directory import RunDirectory
from hpctrain.scheduler.slurm import Slurm
from hpctrain.search.search import train_assigned
from hpctrain.supervise.__main__ import execute, log_to_stdout
from hpctrain.supervise.job import forbid_requeue
from hpctrain.supervise.job_supervisor import JobSupervisor

COMMAND = "python -m hpctrain.search"


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Train the runs that a search gives to this array task; return the exit code for the batch script.

    Args:
        arguments: the folder of the sweep.
        environ: the batch script's environment.
    """
    parser = argparse.ArgumentParser(prog=COMMAND, description="Run a task of a search, from its batch script.")
    parser.add_argument("home", metavar="SWEEP", help="the folder of the sweep")
    home = RunDirectory.at(parser.parse_args(arguments).home)
    try:
        job_id = ClusterEnvironment.from_environment(environ).job_id
        if job_id is None:
            problem = f"{COMMAND} is for batch scripts; elsewhere type python -m hpctrain resume {home.as_typed}"
            raise ClusterEnvironmentError(problem, {})
        log_to_stdout()
        # the array has a task for each new run
        code = train_assigned(home, job_id, JobSupervisor(environ).run, max_new_runs=1)
        if code not in (ExitCode.FINISHED, ExitCode.INTERRUPTED):
            forbid_requeue(Slurm(environ), job_id)
        return code
    except HpctrainError as error:
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"{ERROR_PREFIX}{describe_os_error(error)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    execute(main)

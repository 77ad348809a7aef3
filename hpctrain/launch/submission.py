"""Submission to SLURM: one sbatch job per run, one array for many, written by submitit."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import DelayedSubmission, FailedJobError, FailedSubmissionError, JobPaths

from hpctrain.cluster.scrub import scrubbed
from hpctrain.config.cluster import Slurm
from hpctrain.errors import ConfigError, SchedulerError, SchedulerMissingError
from hpctrain.launch.job import Job
from hpctrain.launch.prepare import RunPlan
from hpctrain.run.directory import RunDirectory
from hpctrain.run.process import environ_replaced
from hpctrain.status.log import SETUP_WARNING

USER_MISTAKES = ("invalid", "not permitted", "more processors", "not available", "unavailable", "unrecognized", "limit")
"""Parts of sbatch's error messages that mean that the request itself was wrong."""

# BASH_COMMAND would name the last command in a function such as `module`. A sourced file, such as a site's profile, may
# have commands that fail on purpose. The job continues, since a line that works may return 1: `source ~/.bashrc`, if
# the last line of that file is a test; `module load`, after a warning
SETUP_TRAP = f"""\
trap '_code=$? _line=$LINENO; if [ ${{#BASH_SOURCE[@]}} -eq 1 ]; then \\
mapfile -t -s $((_line - 1)) -n 1 _text <"$0"; \\
echo "{SETUP_WARNING}$_text (exit code $_code)" >&2; fi' ERR"""
"""The line before cluster.setup: it names the lines that fail, which `status` shows if the supervisor doesn't start."""

SBATCH_TIMEOUT_S = 180.0
"""Seconds that sbatch may take: longer than a failover of the controller, `SlurmctldTimeout`, 120 s by default."""

SHELL = """\
# the supervisor handles these; they must end neither this shell nor a supervisor that isn't ready yet
trap '' TERM USR1 USR2
# if the supervisor is killed, a new one ends its ranks and continues; at most three times in an allocation
supervise() {
    for left in 3 2 1 0; do
        "$@" && code=0 || code=$?
        [ $code -gt 128 ] && [ $left -gt 0 ] || exit $code
        sleep 1
    done
}""".splitlines()
"""The first lines of the script; the shell stays, since SLURM ends the job when the batch script's process ends."""
MISSING = (
    "cluster=slurm: expected an executable {} on this machine; run the command on a login node of the cluster, "
    "or see the script with cluster.dry_run=true"
)


class BatchExecutor(submitit.SlurmExecutor):
    """submitit's executor, which also writes scripts on machines without srun, for a dry run on a laptop."""

    @classmethod
    def affinity(cls) -> int:
        """Always usable; a missing sbatch is an error only when a job is submitted."""
        return 2

    def _submit_command(self, command: str) -> submitit.Job[Any]:
        # sbatch alone: writing the calls of a large array to a busy file system may take longer
        with _bounded(SBATCH_TIMEOUT_S):
            return super()._submit_command(command)

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[submitit.Job[Any]]:
        if len(delayed_submissions) == 1:
            return super()._internal_process_submissions(delayed_submissions)
        # submitit would submit an array by another executor, of its own class, and so without the bound
        folder = JobPaths.get_first_id_independent_folder(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        pickles = [folder / f"{uuid.uuid4().hex}.pkl" for _ in delayed_submissions]
        for delayed, pickle in zip(delayed_submissions, pickles, strict=True):
            delayed.set_timeout(self.parameters["time"], self.max_num_timeout)
            delayed.dump(pickle)
        self.parameters["map_count"] = len(pickles)
        job_id = self._submit_command(self._submitit_command_str).job_id
        tasks = list(range(self._num_tasks()))
        jobs: list[submitit.Job[Any]] = []
        for index, pickle in enumerate(pickles):
            jobs.append(submitit.SlurmJob(self.folder, f"{job_id}_{index}", tasks))
            jobs[-1].paths.move_temporary_file(pickle, "submitted_pickle")
        return jobs


def sbatch_parameters(run: RunPlan, log: str) -> dict[str, Any]:
    """The request to SLURM as submitit's parameters.

    Args:
        run: with cluster=slurm.
        log: the batch script's log, with SLURM's patterns.
    """
    cluster, resources = run.slurm, run.resources
    parameters: dict[str, Any] = {
        "job_name": run.config.name,
        "nodes": resources.num_nodes + cluster.spare_nodes,
        "ntasks_per_node": resources.processes_per_node,
        "time": cluster.time_limit_min,
        "gpus_per_node": resources.gpus_per_node or None,
        "cpus_per_task": resources.cpus_per_process,
        "mem": None if cluster.memory_gb is None else f"{round(cluster.memory_gb * 1024)}M",
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "exclude": cluster.exclude,
        "setup": [*SHELL, *([SETUP_TRAP, *cluster.setup, "trap - ERR"] if cluster.setup else [])],
        "stderr_to_stdout": True,
        # the callable runs in the batch script and calls srun itself, so that it outlives the ranks
        "use_srun": False,
        "array_parallelism": cluster.max_parallel_runs,
        "additional_parameters": _additional(cluster, log),
    }
    # submitit has its own default for wckey, and only an explicit None removes it
    return {name: value for name, value in parameters.items() if value is not None} | {"wckey": None}


def _additional(cluster: Slurm, log: str) -> dict[str, Any]:
    typed: dict[str, Any] = {name.replace("_", "-"): value for name, value in cluster.sbatch.items()}
    requeue = typed.pop("requeue", True) is not False and not typed.get("no-requeue")
    ours = {
        "output": log,
        "signal": f"{cluster.signal}@{cluster.signal_delay_s}",
        "requeue" if requeue else "no-requeue": True,
        "reservation": cluster.reservation,
        "no-kill": True if cluster.spare_nodes else None,
    }
    return {name: value for name, value in (typed | ours).items() if value is not None and value is not False}


def _executor(run: RunPlan, folder: Path, log: str) -> BatchExecutor:
    made = BatchExecutor(folder=folder, python=f"supervise {shlex.quote(sys.executable)}")
    made.update_parameters(**sbatch_parameters(run, log))
    return made


def script(run: RunPlan, home: RunDirectory, runs: int = 1) -> str:
    """The sbatch script of a run.

    Args:
        run: the run, or any run of an array.
        home: the run's directory, or the sweep's.
        runs: more than one for an array.
    """
    made = _executor(run, submitit_folder(home), _batch_log(home, array=runs > 1))
    if runs > 1:
        made.parameters["map_count"] = runs
    text: str = made._make_submission_file_text(made._submitit_command_str, "dry-run")
    return text


def submitit_folder(home: RunDirectory) -> Path:
    """Where submitit keeps the script and the pickled callable."""
    return home.logs / "submitit"


def _batch_log(home: RunDirectory, *, array: bool) -> str:
    return str(home.logs / ("batch_%A_%a.log" if array else "batch_%j.log"))


def require_commands(*names: str) -> None:
    """Check for SLURM's commands before anything is written.

    Args:
        names: sbatch, and srun for an array, which submitit looks for.

    Raises:
        SchedulerMissingError: one isn't in PATH, or this user may not execute it.
    """
    for name in names:
        if shutil.which(name) is None:
            raise SchedulerMissingError(MISSING.format(name))


def submit(runs: Sequence[RunPlan], home: RunDirectory) -> list[str]:
    """Submit one job, or one array for several runs that request the same resources.

    Args:
        runs: prepared; the request is read from the first.
        home: where the script and the batch logs go: the run's own directory, or the sweep's.

    Returns:
        The job id of each run, `12_3` in an array.

    Raises:
        ConfigError: SLURM refuses the request.
        SchedulerError: sbatch failed otherwise.
        RunDirectoryError: the script can't be written, or another user could replace it.
    """
    array = len(runs) > 1
    log = _batch_log(home, array=array)
    # the umask also reaches the job: sbatch hands it to the batch script
    mode = runs[0].config.mode
    with home.permissions(mode):
        for folder in (home.logs, submitit_folder(home)):
            home.close_folder(folder, mode)
        executor = _executor(runs[0], submitit_folder(home), log)
        # submitit prints to standard error what sbatch answers; the exception has it as well
        with (
            environ_replaced(scrubbed(os.environ)),
            _explained(runs[0].config.name),
            contextlib.redirect_stderr(io.StringIO()),
            executor.batch() if array else contextlib.nullcontext(),
        ):
            submitted = [executor.submit(Job(str(run.directory.path))) for run in runs]
        job_ids = [str(job.job_id) for job in submitted]
    for run, job_id in zip(runs, job_ids, strict=True):
        array_id, _, task = job_id.partition("_")
        name = log.replace("%A", array_id).replace("%a", task).replace("%j", job_id)
        run.directory.record_job({"job_id": job_id, "time": time.time(), "log": name})
    return job_ids


@contextlib.contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """Raise TimeoutError by an alarm after ``seconds`` in the context; submitit then kills sbatch."""

    def end(*_: object) -> None:
        raise TimeoutError

    # submitit runs sbatch without a bound, and offers none
    before = signal.signal(signal.SIGALRM, end)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)


@contextlib.contextmanager
def _explained(name: str | None) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, PermissionError) as error:
        raise SchedulerMissingError(MISSING.format("sbatch")) from error
    except TimeoutError as error:
        raise _unsure(f"did not answer within {SBATCH_TIMEOUT_S:g} s", name) from error
    except FailedSubmissionError as error:
        raise _unsure(f"printed no job id: {str(error).splitlines()[0]}", name) from error
    except (FailedJobError, subprocess.CalledProcessError) as error:
        if isinstance(error.__cause__, TimeoutError):
            raise _unsure(f"did not answer within {SBATCH_TIMEOUT_S:g} s", name) from error
        answer = "; ".join(line.split("error:")[-1].strip() for line in str(error).splitlines() if "error:" in line)
        text = answer or str(error).strip()
        if any(mistake in text.lower() for mistake in USER_MISTAKES):
            raise ConfigError(
                "cluster", "slurm", f"sbatch refused the job: {text}", "see `sinfo` and cluster.*"
            ) from error
        raise SchedulerError(f"sbatch failed: {text}; nothing was submitted") from error


def _unsure(what: str, name: str | None) -> SchedulerError:
    # a job that has no number here can't train: submitit names the pickled call by the number, and the job needs it
    return SchedulerError(
        f"sbatch {what}; a job may have been submitted that will fail when it starts: find it with `squeue --me "
        f"--name={name}`, cancel it, and run the command again"
    )

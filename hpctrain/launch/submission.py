"""A SLURM cluster: one sbatch job per run, one array for many, written by submitit."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from hpctrain.cluster.scrub import scrubbed
from hpctrain.config.cluster import Slurm
from hpctrain.config.resources import resources_of
from hpctrain.config.root import Config
from hpctrain.errors import ConfigError, SchedulerError, SchedulerMissingError
from hpctrain.launch.job import Job
from hpctrain.run.directory import RunDirectory

USER_MISTAKES = ("invalid", "not permitted", "more processors", "not available", "unavailable", "unrecognized", "limit")
"""Words in sbatch's answer that put the blame on what was asked for."""


class BatchExecutor(submitit.SlurmExecutor):
    """submitit's executor, also where there is no srun: a dry run on a laptop."""

    @classmethod
    def affinity(cls) -> int:
        """Always usable; a missing sbatch is told when something is submitted."""
        return 2


def sbatch_parameters(config: Config, log: str) -> dict[str, Any]:
    """The configuration in submitit's words.

    The callable runs in the batch script itself and calls srun, so that the ranks' end is judged from outside of them.

    Args:
        config: a checked configuration with cluster=slurm.
        log: the batch script's log, with SLURM's patterns.
    """
    cluster = config.cluster
    assert isinstance(cluster, Slurm)
    resources = resources_of(config)
    more: dict[str, Any] = {name.replace("_", "-"): value for name, value in cluster.sbatch.items()}
    requeue = more.pop("requeue", True) is not False and not more.get("no-requeue")
    more = {name: value for name, value in more.items() if value is not False}
    more |= {
        "output": log,
        "signal": f"{cluster.signal}@{cluster.signal_delay_s}",
        "requeue" if requeue else "no-requeue": True,
        "reservation": cluster.reservation,
        "no-kill": True if cluster.spare_nodes else None,
    }
    parameters: dict[str, Any] = {
        "job_name": config.name,
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
        # a SIGTERM that comes before the supervisor hears it would end the job, and nobody would requeue it
        "setup": ["trap '' TERM", *cluster.setup],
        "stderr_to_stdout": True,
        "use_srun": False,
        "wckey": None,
        "additional_parameters": {key: value for key, value in more.items() if value is not None},
    }
    if cluster.max_parallel_runs is not None:
        parameters["array_parallelism"] = cluster.max_parallel_runs
    return {key: value for key, value in parameters.items() if value is not None or key == "wckey"}


def executor(config: Config, folder: Path, log: str) -> BatchExecutor:
    """An executor that would submit this configuration; nothing is written yet."""
    # without exec, bash is the first to die of a SIGTERM, and takes along whoever is to judge the ranks' end
    made = BatchExecutor(folder=folder, python=f"exec {shlex.quote(sys.executable)}")
    made.update_parameters(**sbatch_parameters(config, log))
    return made


def script(config: Config, directory: RunDirectory, runs: int = 1) -> str:
    """The sbatch script of this configuration.

    Args:
        config: of the run, or of any run of an array.
        directory: of the run, or of the sweep.
        runs: more than one for an array.
    """
    made = executor(config, submitit_folder(directory), batch_log(directory, array=runs > 1))
    if runs > 1:
        made.parameters["map_count"] = runs
    text: str = made._make_submission_file_text(made._submitit_command_str, "dry-run")
    return text


def submitit_folder(directory: RunDirectory) -> Path:
    """Where submitit keeps the script and the pickled callable."""
    return directory.logs / "submitit"


def batch_log(directory: RunDirectory, *, array: bool) -> str:
    """The batch script's log, with SLURM's patterns for the job id."""
    return str(directory.logs / ("batch_%A_%a.log" if array else "batch_%j.log"))


def submit(configs: Sequence[Config], runs: Sequence[RunDirectory], home: RunDirectory) -> list[str]:
    """Submit one job, or one array for several runs that ask for the same resources.

    Args:
        configs: one per run; the resources are read from the first.
        runs: their directories.
        home: where the script and the batch logs go: the run's own directory, or the sweep's.

    Returns:
        The job id of each run, `12_3` in an array.

    Raises:
        ConfigError: SLURM doesn't take what is asked for.
        SchedulerError: sbatch failed otherwise.
    """
    if "%" in str(home.path):
        raise ConfigError("run_dir", home.path, "holds a %, which SLURM replaces in names of logs", "leave it out")
    array = len(runs) > 1
    log = batch_log(home, array=array)
    home.logs.mkdir(parents=True, exist_ok=True)
    made = executor(configs[0], submitit_folder(home), log)
    jobs = [Job(str(run.path)) for run in runs]
    with _outside_any_allocation(), _told_by_sbatch(), contextlib.redirect_stderr(io.StringIO()):
        if array:
            with made.batch():
                submitted = [made.submit(job) for job in jobs]
        else:
            submitted = [made.submit(jobs[0])]
    job_ids = [str(job.job_id) for job in submitted]
    for run, job_id in zip(runs, job_ids, strict=True):
        array_id, _, task = job_id.partition("_")
        name = log.replace("%A", array_id).replace("%a", task).replace("%j", job_id)
        run.record_job({"job_id": job_id, "time": time.time(), "log": name})
    return job_ids


@contextlib.contextmanager
def _outside_any_allocation() -> Iterator[None]:
    saved = dict(os.environ)
    clean = scrubbed(saved)
    for name in saved.keys() - clean.keys():
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(saved)


@contextlib.contextmanager
def _told_by_sbatch() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise SchedulerMissingError(
            "cluster=slurm: there is no sbatch on this machine; type the command on a login node of the cluster, "
            "or see the script with cluster.dry_run=true"
        ) from error
    except (FailedJobError, FailedSubmissionError, subprocess.CalledProcessError) as error:
        answer = "; ".join(line.split("error:")[-1].strip() for line in str(error).splitlines() if "error:" in line)
        text = answer or str(error).strip()
        if any(word in text.lower() for word in USER_MISTAKES):
            raise ConfigError(
                "cluster", "slurm", f"sbatch refused the job: {text}", "see `sinfo` and cluster.*"
            ) from error
        raise SchedulerError(f"sbatch failed: {text}; nothing was submitted") from error

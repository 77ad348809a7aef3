"""Submission to SLURM: one sbatch job per run, one array for many, with the batch script that submitit makes."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import DelayedSubmission, JobPaths

from hpctrain.errors import ERROR_PREFIX, HpctrainError, RunDirectoryError, SchedulerError
from hpctrain.files import write_atomic
from hpctrain.launch.after import LATER, start_options
from hpctrain.launch.job import DoctorJob, Job, SearchJob
from hpctrain.launch.prepare import RunPlan
from hpctrain.launch.sbatch import (
    DependencyRefusedError,
    NoSuchNodesError,
    describe_unsubmitted,
    explain_gpus,
    is_accepted,
    largest_array,
    print_excess,
    sbatch,
    task_arrays,
)
from hpctrain.phrases import numbered
from hpctrain.run.directory import RunDirectory
from hpctrain.run.file_system import explain
from hpctrain.run.job_records import JobRecords
from hpctrain.scheduler.slurm import Slurm
from hpctrain.startup import is_found_here
from hpctrain.status.jobs import SETUP_ERROR
from hpctrain.streams import print_warning

# BASH_COMMAND would name the last command in a function such as `module`. A sourced file, such as a site's profile, may
# have commands that fail on purpose: what counts is the value that the line itself returns. Not `set -e`, which would
# also end those. The code is always 1: sites may have SLURM requeue jobs for others (RequeueExit in slurm.conf).
SETUP_TRAP = f"""\
trap '_code=$? _line=$LINENO; if [ ${{#BASH_SOURCE[@]}} -eq 1 ]; then \\
mapfile -t -s $((_line - 1)) -n 1 _text <"$0"; \\
echo "{SETUP_ERROR}$_text (exit code $_code); correct it, or append || true if it may fail" >&2; exit 1; fi' ERR"""
"""The line before cluster.setup: it ends the job at the first line that fails, which `status` shows."""
MAX_TIMEOUTS = 3
"""Timeouts after which submitit wouldn't requeue a job, in the moment before it executes the supervisor."""

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


class BatchExecutor(submitit.SlurmExecutor):
    """submitit's executor, which also makes scripts on machines without srun, for a dry run on a laptop."""

    @classmethod
    def affinity(cls) -> int:
        """Always usable."""
        return 2


def sbatch_parameters(run: RunPlan, log: str, start: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The request to SLURM as submitit's parameters.

    Args:
        run: with cluster=slurm.
        log: the batch script's log, with SLURM's patterns.
        start: options on when the job may start; see `start_options`.
    """
    cluster = run.slurm
    parameters: dict[str, Any] = {
        "job_name": run.config.name,
        **_nodes_and_tasks(run),
        "time": cluster.time_limit_min,
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
        "additional_parameters": _additional(run, log, start or {}),
    }
    # submitit has its own default for wckey, and only an explicit None removes it
    return {name: value for name, value in parameters.items() if value is not None} | {"wckey": None}


def _nodes_and_tasks(run: RunPlan) -> dict[str, Any]:
    """The nodes, and the tasks and cores on each of them."""
    resources, counts, spare = run.resources, run.node_counts, run.slurm.spare_nodes
    tasks, cores = resources.processes_per_node, resources.cpus_per_process
    if len(counts) == 1:
        return {"nodes": counts[0] + spare, "ntasks_per_node": tasks, "cpus_per_task": cores}
    # With --ntasks-per-node=1, SLURM 22.05.8 computes a number of tasks from the smallest number of nodes, and gives
    # the job no more nodes than that: 2 of 4 idle ones for --nodes=2-4, which alone got all 4. So a node gets one task,
    # with the cores of all ranks; srun then starts the ranks.
    return {"nodes": f"{counts[-1]}-{counts[0] + spare}", "cpus_per_task": tasks * (cores or 1)}


def _additional(run: RunPlan, log: str, start: Mapping[str, str]) -> dict[str, Any]:
    cluster = run.slurm
    user_options: dict[str, Any] = {name.replace("_", "-"): value for name, value in cluster.sbatch.items()}
    requeue = user_options.pop("requeue", None)  # or the text "expedite", from SLURM 25.11 on
    if user_options.get("no-requeue"):
        requeue = False
    ours = {
        "output": log,
        "signal": f"{cluster.signal}@{cluster.signal_delay_s}",
        "no-requeue" if requeue is False else "requeue": requeue or True,
        "reservation": cluster.reservation,
        "no-kill": True if run.outlives_a_node else None,
        **cluster.gpus.sbatch_options(run.resources.processes_per_node),
        **start,
    }
    if (user_dependency := user_options.get("dependency")) and "dependency" in start:
        # SLURM can't combine all of several jobs with any of others, which ? separates; the supervisor looks anyway
        ours["dependency"] = user_dependency if "?" in user_dependency else f"{user_dependency},{start['dependency']}"
    return {name: value for name, value in (user_options | ours).items() if value is not None and value is not False}


def script(
    run: RunPlan,
    home: RunDirectory,
    runs: int = 1,
    max_parallel: int | None = None,
    start: Mapping[str, str] | None = None,
) -> str:
    """The sbatch script of a run.

    Args:
        run: the run, or any run of an array.
        home: the run's directory, or the sweep's.
        runs: more than one for an array.
        max_parallel: tasks of the array that may run at the same time; None: cluster.max_parallel_runs.
        start: options on when the job may start; see `start_options`.
    """
    # submitit and the pickled call must not be shadowed by modules of the working directory
    safe = "" if is_found_here() else " -P"
    executor = BatchExecutor(folder=home.submitit, python=f"supervise {shlex.quote(sys.executable)}{safe}")
    executor.update_parameters(**sbatch_parameters(run, _batch_log(home, array=runs > 1), start))
    if runs > 1:
        executor.parameters["map_count"] = runs
        # submitit's own default is 256
        executor.parameters["array_parallelism"] = max_parallel or run.slurm.max_parallel_runs or runs
    text: str = executor._make_submission_file_text(executor._submitit_command_str, "")
    return text


def _batch_log(home: RunDirectory, *, array: bool) -> str:
    return str(home.logs / ("batch_%A_%a.log" if array else "batch_%j.log"))


def submit(
    runs: Sequence[RunPlan], home: RunDirectory, max_parallel: int | None = None, *, continues: bool = False
) -> list[str]:
    """Submit one job, or one array for several runs that request the same resources, and record it in each run.

    The batch script of a job becomes `python -m hpctrain.supervise RUN_DIRECTORY`.

    A job that can't be recorded is cancelled; if that fails too, the error says how to cancel it. If no job was
    recorded, the script and the calls are removed, so that a job that sbatch submitted without printing its id can't
    train.

    Args:
        runs: prepared; the request is read from the first.
        home: where the script and the batch logs go: the run's own directory, or the sweep's.
        max_parallel: runs of the array that may run at the same time; None: cluster.max_parallel_runs.
        continues: whether the job takes the place of another, and continues the run without waiting for other runs.

    Returns:
        The job id of each run, `12_3` in an array.

    Raises:
        ConfigError: SLURM refuses the request.
        SubmitLimitError: it has as many jobs of this user as it takes.
        SchedulerError: sbatch failed otherwise, or the job was submitted and can't be recorded.
        RunDirectoryError: the script can't be written, or another user could replace it.
    """
    calls = [Job(str(run.directory.path)) for run in runs]
    return _submit(runs[0], calls, [run.directory for run in runs], home, max_parallel, continues=continues)


def submit_search(run: RunPlan, home: RunDirectory, num_tasks: int) -> list[str]:
    """Submit the tasks of a search, which ask for their runs, and record them in the sweep's folder; see `submit`.

    The batch script of a task becomes `python -m hpctrain.search SWEEP`.

    If SLURM refuses an array after it accepted another, a line on standard error says how many tasks are missing.

    Args:
        run: any run of the search, from which the request is read.
        home: the sweep's folder.
        num_tasks: of the search, in as few arrays as SLURM allows.

    Returns:
        The job ids of the submitted tasks: at least one, and fewer than ``num_tasks`` after a refusal.

    Raises:
        HpctrainError: nothing could be submitted; see `submit`.
    """
    limit = run.slurm.max_parallel_runs
    arrays = task_arrays([range(num_tasks)], limit, largest_array(num_tasks))
    print_excess(limit, len(arrays))
    job_ids: list[str] = []
    for array in arrays:
        count = len(array.tasks)
        try:
            job_ids += _submit(run, [SearchJob(str(home.path))] * count, [home] * count, home, array.max_parallel)
        except HpctrainError as error:
            if not job_ids:
                raise
            missing = describe_unsubmitted(num_tasks - len(job_ids), num_tasks, "task", home, error)
            print(f"{ERROR_PREFIX}{missing}", file=sys.stderr)
            break
    return job_ids


def would_be_accepted(run: RunPlan) -> bool:
    """Ask sbatch whether it would take the job of a run; nothing is submitted.

    Raises:
        SchedulerError: it didn't answer.
    """
    return is_accepted(script(run, run.directory))


def submit_doctor(run: RunPlan) -> str:
    """Submit the job of the doctor with the request of a run, into the folder of the examination.

    Args:
        run: whose directory is that folder.

    Returns:
        The job id.

    Raises:
        HpctrainError: nothing was submitted; see `submit`.
    """
    home = run.directory
    (job_id,) = _submit(run, [DoctorJob(str(home.path))], [home], home, None)
    return job_id


def _submit(
    run: RunPlan,
    jobs: Sequence[Job | SearchJob | DoctorJob],
    owners: Sequence[RunDirectory],
    home: RunDirectory,
    max_parallel: int | None,
    *,
    continues: bool = False,
) -> list[str]:
    mode = run.config.mode
    token = uuid.uuid4().hex
    job_ids: list[str] = []
    sbatch_id = ""
    recorded = 0
    # the umask also reaches the job: sbatch hands it to the batch script
    with home.permissions(mode):
        for folder in (home.logs, home.submitit):
            home.close_folder(folder, mode)
        try:
            calls = _write_calls(run, jobs, home, token)
            text = home.submitit / f".submission_file_{token}.sh"
            # a search decides itself which run begins when, and the doctor's job has none
            waits = isinstance(jobs[0], Job) and not continues
            start = _without_users(start_options(run.config) if waits else {}, run)
            sbatch_id = _sbatch(run, text, start, partial(script, run, home, len(jobs), max_parallel))
            job_ids = [f"{sbatch_id}_{task}" for task in range(len(jobs))] if len(jobs) > 1 else [sbatch_id]
            # SLURM shows the script by the name that sbatch was given
            JobPaths(home.submitit, job_ids[0]).move_temporary_file(text, "submission_file", keep_as_symlink=True)
            for owner, call, job_id in zip(owners, calls, job_ids, strict=True):
                _record(owner, job_id, _batch_log(home, array=len(jobs) > 1), continues=continues)
                # after the record: if this process is killed, no job trains of which the run doesn't know
                JobPaths(home.submitit, job_id).move_temporary_file(call, "submitted_pickle")
                recorded += 1
        except BaseException as error:
            _remove_files(home, [f"{token}_*"] if recorded else [f"*{token}*", f"{sbatch_id or token}_*"])
            if len(job_ids) > recorded:
                lost = job_ids[recorded:] if recorded else [sbatch_id]
                raise _cancel_unrecorded(lost, job_ids[:recorded], error) from error
            if isinstance(error, OSError):
                raise RunDirectoryError(
                    f"run_dir={home.path}: the job's script can't be written ({explain(error)}), so nothing "
                    "was submitted; make room there, or choose a folder that you may write to"
                ) from error
            raise
    return job_ids


def _write_calls(
    run: RunPlan, jobs: Sequence[Job | SearchJob | DoctorJob], home: RunDirectory, token: str
) -> list[Path]:
    """Write each task's pickled call under a name with ``token``, until the job has an id."""
    calls = []
    for number, job in enumerate(jobs):
        call = DelayedSubmission(job)
        # as submitit's executor does: it requeues a job that is preempted just before the supervisor handles signals
        call.set_timeout(run.slurm.time_limit_min, MAX_TIMEOUTS)
        calls.append(home.submitit / f"{token}_{number}.pkl")
        call.dump(calls[-1])
    return calls


def _sbatch(run: RunPlan, text: Path, start: Mapping[str, str], make_script: Callable[[Mapping[str, str]], str]) -> str:
    """Write a script and submit it; without its dependency if SLURM refuses that; return the job's id, or the array's.

    Args:
        run: any of its runs.
        text: the file.
        start: options on when the job may start.
        make_script: makes the script with such options.
    """
    name = str(run.config.name)
    write_atomic(text, make_script(start), durable=False)
    try:
        try:
            return sbatch(text, name)
        except DependencyRefusedError as error:
            if "dependency" not in start:
                raise
            print_warning(f"{error}; submitted without the dependency: the job itself looks at the other runs")
        write_atomic(text, make_script(_without_users(LATER, run)), durable=False)
        return sbatch(text, name)
    except NoSuchNodesError as error:
        raise explain_gpus(error, run.slurm.gpus, run.slurm.partition) from error


def _without_users(start: Mapping[str, str], run: RunPlan) -> Mapping[str, str]:
    """Options on when a job may start, without the user's own `begin`: the job looks again anyway."""
    return {name: value for name, value in start.items() if name != "begin" or "begin" not in run.slurm.sbatch}


def _record(owner: RunDirectory, job_id: str, log: str, *, continues: bool) -> None:
    array_id, _, task = job_id.partition("_")
    name = log.replace("%A", array_id).replace("%a", task).replace("%j", job_id)
    extra_fields = {"continues": True} if continues else {}
    JobRecords(owner).add({"job_id": job_id, "time": time.time(), "log": name, **extra_fields})


def _remove_files(home: RunDirectory, patterns: Sequence[str]) -> None:
    for file in [file for pattern in patterns for file in home.submitit.glob(pattern)]:
        with contextlib.suppress(OSError):
            file.unlink()


def _cancel_unrecorded(job_ids: Sequence[str], recorded: Sequence[str], error: BaseException) -> SchedulerError:
    """Cancel jobs that can't be recorded; return the error to raise, which also names those that are recorded."""
    if isinstance(error, OSError):
        why = explain(error)
    else:
        why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
    remark = f"; {numbered('job', recorded)} stayed" if recorded else ""
    if refused := Slurm().cancel_all(job_ids):
        problem = next(iter(refused.values()))
        failed = f"{numbered('job', list(refused))} could be neither recorded ({why}) nor cancelled ({problem}){remark}"
        return SchedulerError(f"{failed}; cancel with `scancel {' '.join(refused)}`")
    done = f"{numbered('job', job_ids)} could not be recorded ({why}), and had to be cancelled{remark}"
    return SchedulerError(f"{done}; run the command again")

"""The doctor's job: submitted with the request of a run, and waited for."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from hpctrain.config.cluster import Slurm as SlurmCluster
from hpctrain.config.resources import resources_of
from hpctrain.config.root import Config
from hpctrain.config.stored import to_yaml
from hpctrain.doctor.folder import (
    DoctorFolder,
    DoctorJob,
    DoctorOptions,
    RankRecord,
    read_job,
    read_rank,
    write_record,
)
from hpctrain.errors import ConfigError, RunDirectoryError, SchedulerError, SchedulerMissingError
from hpctrain.files import write_atomic
from hpctrain.launch.prepare import RunPlan, claim_default_path
from hpctrain.launch.submission import submit_doctor
from hpctrain.phrases import listed
from hpctrain.scheduler.job import SlurmJob, explain_held, explain_pending
from hpctrain.scheduler.slurm import Slurm

TIME_LIMIT_MIN = 15
"""Time limit of the job: a short one starts sooner, and the checks take less than three minutes."""
LOOK_EVERY_S = 0.2
ASK_EVERY_S = 2.0
"""Seconds between two queries to SLURM at the beginning; they become rarer while the job is in the queue."""
ASK_SELDOM_S = 15.0
LATE_S = 20.0
"""Seconds that the job's last record may take to cross a shared file system."""
NEVER = re.compile(
    r"BadConstraints|PartitionTimeLimit|PartitionNodeLimit|PartitionConfig|ReservationDeleted|Invalid(Account|QOS)"
    r"|(Account|QOS)NotAllowed|MaxMemPerLimit|DependencyNeverSatisfied"
)
"""Reasons for which a job waits that no time changes."""


def submit_examination(config: Config, options: DoctorOptions) -> tuple[DoctorFolder, str]:
    """Make the folder of an examination, and submit its job; return both.

    Args:
        config: of the run that is to work, with cluster=slurm; `run_dir` names the folder, if it is set.
        options: the words and flags of the command.

    Raises:
        RunDirectoryError: the folder isn't empty, or can't be written.
        HpctrainError: nothing was submitted.
    """
    if config.run_dir is not None and Path(config.run_dir).is_dir() and any(Path(config.run_dir).iterdir()):
        raise RunDirectoryError(f"run_dir={config.run_dir}: the folder isn't empty; name a new one for the doctor")
    path = Path(config.run_dir or claim_default_path("doctor")).absolute()
    stored = dataclasses.replace(config, name="doctor", run_dir=str(path))
    folder = DoctorFolder(path)
    folder.as_run.create_for_sweep(config.mode)
    with folder.as_run.permissions():
        for place in (folder.nodes, folder.ranks):
            place.mkdir(exist_ok=True)
        write_atomic(folder.request, to_yaml(stored))
        write_atomic(folder.token, secrets.token_hex(8))
        write_record(folder.options, options)
    limited = dataclasses.replace(stored, cluster=_short(config.cluster))
    try:
        return folder, submit_doctor(RunPlan(limited, folder.as_run, resources_of(limited)))
    except ConfigError:  # SLURM refuses the job: the same command may be typed again
        shutil.rmtree(path, ignore_errors=True)
        raise


def _short(cluster: object) -> SlurmCluster:
    """The request of a short job that isn't requeued: its command would wait for it a second time."""
    assert isinstance(cluster, SlurmCluster)
    limit = min(TIME_LIMIT_MIN, cluster.time_limit_min)
    options = {name: value for name, value in cluster.sbatch.items() if name not in {"no_requeue", "no-requeue"}}
    sbatch = {**options, "requeue": False}
    return dataclasses.replace(cluster, time_limit_min=limit, signal_delay_s=0, sbatch=sbatch)


class JobNeverStartsError(SchedulerError):
    """The job waits for something that no time changes; the message explains what."""


def wait_for_job(
    folder: DoctorFolder, job_id: str, slurm: Slurm, report: Callable[[str], None]
) -> tuple[DoctorJob | None, str]:
    """Wait until the job is over; report why it waits, and what it does.

    Args:
        folder: of the examination.
        job_id: of its job.
        slurm: is asked for the job.
        report: gets a line for each change.

    Returns:
        What the job left, None if nothing; and the state in which SLURM says that it ended, empty if it doesn't know.

    Raises:
        JobNeverStartsError: it will never start.
    """
    said: set[str] = set()

    def once(text: str) -> None:
        if text and text not in said:
            said.add(text)
            report(text)

    ask_at, every_s, over_at, state = 0.0, ASK_EVERY_S, None, ""
    while True:
        _look_anew(folder.path)
        record = read_job(folder)
        if record is not None and record.stage == "done":
            return record, state
        if record is not None and record.stage == "ranks":
            once(f"ranks measure on {listed(record.rank_nodes, separator=' ')}")
        now = time.monotonic()
        if over_at is not None and now - over_at > LATE_S:
            return record, state
        if now >= ask_at:
            ask_at, every_s = now + every_s, min(every_s * 1.2, ASK_SELDOM_S)
            answered, job = _ask(slurm, job_id, once)
            once(_described(job, job_id))
            if job is not None and job.state.is_pending and NEVER.match(job.reason):
                raise JobNeverStartsError(explain_pending(job.reason))
            # SLURM forgets a job that ended a while ago
            if answered and over_at is None and (job is None or job.state.is_finished):
                over_at, state = now, "" if job is None else job.state.value
        time.sleep(LOOK_EVERY_S)


def wait_for_records(folder: DoctorFolder, world_size: int, *, late_s: float = LATE_S) -> dict[int, RankRecord]:
    """Read the records of ranks, once the job is over; on a shared file system they may come after the job's own.

    Args:
        folder: of the examination.
        world_size: number of ranks that were started.
        late_s: seconds to wait for those that are missing, or say that their rank hasn't ended.

    Returns:
        The records by rank, without ranks that left none.

    Raises:
        RunDirectoryError: a field of the record has the wrong type.
    """
    deadline = time.monotonic() + late_s
    while True:
        for place in (folder.path, folder.ranks):
            _look_anew(place)
        records = {rank: record for rank in range(world_size) if (record := read_rank(folder, rank))}
        ended = sum(record.has_ended for record in records.values())
        if ended == world_size or time.monotonic() > deadline:
            return records
        time.sleep(LOOK_EVERY_S)


def _look_anew(folder: Path) -> None:
    """Have NFS look for new files, which it does when a folder is listed."""
    with contextlib.suppress(OSError):
        os.listdir(folder)  # noqa: PTH208 - for its effect


def _ask(slurm: Slurm, job_id: str, once: Callable[[str], None]) -> tuple[bool, SlurmJob | None]:
    """Whether SLURM answered, and its record of the job."""
    try:
        return True, slurm.find([job_id])[job_id]
    except SchedulerMissingError as error:
        once(f"SLURM doesn't answer: {error}")
        return False, None


def _described(job: SlurmJob | None, job_id: str) -> str:
    if job is None or not job.state.is_pending:
        return ""
    return f"job {job_id} is queued: {explain_held(job) or explain_pending(job.reason)}"

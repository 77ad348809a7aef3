"""Wait for the doctor's job."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpctrain.doctor.folder import DoctorFolder
from hpctrain.doctor.job_record import JobRecord
from hpctrain.doctor.rank_answers import read_rank
from hpctrain.errors import SchedulerError, SchedulerMissingError
from hpctrain.phrases import listed
from hpctrain.scheduler.explain import explain_held, explain_pending
from hpctrain.scheduler.job import JobRecord as SlurmJob
from hpctrain.scheduler.slurm import Slurm

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


class JobNeverStartsError(SchedulerError):
    """The job waits for something that no time changes; the message explains what."""


def wait_for_job(
    folder: DoctorFolder, job_id: str, slurm: Slurm, report: Callable[[str], None]
) -> tuple[JobRecord | None, str]:
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
        record = JobRecord.read(folder)
        once(_progress(record))
        if record is not None and record.stage == "done":
            return record, state
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


def wait_for_records(folder: DoctorFolder, world_size: int, *, late_s: float = LATE_S) -> dict[int, dict[str, Any]]:
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
        found = {rank: one for rank in range(world_size) if (one := read_rank(folder, rank))}
        ended = sum(one.get("stage") == "done" or bool(one.get("error")) for one in found.values())
        if ended == world_size or time.monotonic() > deadline:
            return found
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


def _progress(record: JobRecord | None) -> str:
    if record is None or record.stage == "nodes":
        return ""
    if record.stage == "ranks":
        return f"ranks measure on {listed(record.rank_nodes, separator=' ')}"
    return ""

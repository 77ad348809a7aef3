"""What the commands ask the scheduler about the jobs of runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from hpctrain.errors import SchedulerError, SchedulerMissingError
from hpctrain.scheduler.explain import explain_pending
from hpctrain.scheduler.job import JobRecord
from hpctrain.scheduler.slurm import Slurm
from hpctrain.status.state import JobPhase, JobView


def ask(job_ids: Sequence[str]) -> Mapping[str, JobView | None] | None:
    """The scheduler's view of jobs, all in one question.

    Returns:
        By job id, None for one that it doesn't know (any more); None altogether where it can't be asked from here.
    """
    if not job_ids:
        return {}
    try:
        records = Slurm().find(job_ids)
    except SchedulerMissingError:
        return None
    except SchedulerError as error:
        print(f"hpctrain: warning: {error}", file=sys.stderr)
        return None
    return {job_id: None if record is None else _view(record) for job_id, record in records.items()}


def _view(record: JobRecord) -> JobView:
    if record.state.is_pending:
        return JobView(JobPhase.PENDING, explain_pending(record.reason), record.start_time)
    if record.state.is_running:
        return JobView(JobPhase.RUNNING)
    return JobView(JobPhase.ENDED, record.state.value)

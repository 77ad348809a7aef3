"""The status of a run, read from its directory and from SLURM's records of its jobs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpctrain.config.plain_yaml import read_plain_config
from hpctrain.errors import RunDirectoryError, SchedulerError, SchedulerMissingError
from hpctrain.files import describe_os_error
from hpctrain.run.bottleneck import Bottleneck, last_bottleneck
from hpctrain.run.checkpoints import saved_step
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import last_evaluation
from hpctrain.run.job_records import JobRecords
from hpctrain.run.ledger import Attempt, Ledger
from hpctrain.run.manifest import read_varied
from hpctrain.run.owner import Owner
from hpctrain.run.record_fields import COUNT
from hpctrain.run.score import Score
from hpctrain.run.times import read_times
from hpctrain.scheduler.job import JobRecord
from hpctrain.scheduler.slurm import JOB_ID, Slurm
from hpctrain.status.accounting import Account, WallTime, account
from hpctrain.status.log import batch_script_error
from hpctrain.status.metrics import read_metrics
from hpctrain.status.state import RunFacts, RunState, derive_state, job_that_may_run, unstarted_job
from hpctrain.streams import Report, print_warning

TAIL_BYTES = 64 * 2**10
"""Bytes to read at the end of metrics.jsonl: a few hundred records."""

Jobs = Mapping[str, JobRecord | None]
"""SLURM's records by job id; None for a job that SLURM doesn't know, or no longer remembers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The status of a run; times are epoch seconds.

    Attributes:
        name: the run's name in its configuration.
        path: its directory.
        state: its state.
        note: the reason for the state, in one line; empty if the state needs none.
        step: the last step known to be completed.
        total_steps: the step at which the run ends; None if only the number of epochs is known.
        metrics: the last value of each metric, NaN and infinities included.
        metrics_time: when the last of them was logged.
        best: the best value of the metric by which the run is judged; None before the first evaluation.
        best_step: its step.
        varied: the keys that the run's sweep varied, with this run's values as typed; empty without a sweep.
        checkpoint_step: of the newest complete checkpoint; None without one.
        set_aside: names of damaged checkpoints that a resume passed over.
        attempts: oldest first; an open one with the times that it has recorded so far.
        account: where the wall time went.
        verdict: the newest bottleneck that an attempt recorded; None without one.
        job_ids: every job of the run, oldest first.
        may_start: when a queued run is expected to start.
        unstarted: whether the newest job ended before it began an attempt, so that the last one has another job.
        job_that_may_run: the job that may still be queued or running, by the run's own records; None if no job is left.
    """

    name: str
    path: Path
    state: RunState
    note: str = ""
    step: int = 0
    total_steps: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metrics_time: float | None = None
    best: Score | None = None
    best_step: int | None = None
    varied: Mapping[str, str] = field(default_factory=dict)
    checkpoint_step: int | None = None
    set_aside: tuple[str, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    account: Account
    verdict: Bottleneck | None = None
    job_ids: tuple[str, ...] = ()
    may_start: float | None = None
    unstarted: bool = False
    job_that_may_run: str | None = None

    @property
    def described(self) -> str:
        """The state with its reason, as in ``queued (waiting for nodes)``."""
        return f"{self.state} ({self.note})" if self.note else str(self.state)

    @property
    def last_sign(self) -> float | None:
        """When the run last logged a metric, began an attempt or ended one; None before the first."""
        times = [when for attempt in self.attempts for when in (attempt.start_time, attempt.end_time)]
        return max((when for when in (self.metrics_time, *times) if when is not None), default=None)


def read_statuses(directories: Sequence[RunDirectory], warn: Report = print_warning) -> list[RunStatus]:
    """Read the statuses of runs; a run whose records can't be read is `unreadable`.

    SLURM is queried once for all of them.

    Args:
        directories: of the runs.
        warn: gets a line if SLURM is there and doesn't answer.
    """
    # one squeue for all: a sweep has hundreds of runs, and every query loads the controller
    jobs = ask_slurm(_readable_job_ids(directories), warn)
    return [_read_or_explain(directory, jobs) for directory in directories]


def _readable_job_ids(directories: Sequence[RunDirectory]) -> list[str]:
    ids: list[str] = []
    for directory in directories:
        # such a run has the state `unreadable`
        with contextlib.suppress(OSError, RunDirectoryError):
            ids += job_ids(directory)
    return ids


def _read_or_explain(directory: RunDirectory, jobs: Jobs | None) -> RunStatus:
    try:
        return read_status(directory, jobs)
    except (OSError, RunDirectoryError) as error:
        why = describe_os_error(error) if isinstance(error, OSError) else str(error)
        nothing = Account(attempts=(), spent=WallTime(), steps_lost=0)
        return RunStatus(
            name=directory.path.name, path=directory.path, state=RunState.UNREADABLE, note=why, account=nothing
        )


def require_stopped(directory: RunDirectory, *, force: bool = False) -> RunStatus:
    """Return the run's status if it is stopped: a run must never have two attempts at once.

    Args:
        directory: the run.
        force: whether the user insists that its job is over, where SLURM can't be reached.

    Raises:
        RunDirectoryError: the run is queued, starting or running; or it may be, and SLURM can't be reached; or its
            records can't be read.
    """
    (status,) = statuses_before_launch([directory], force=force)
    if status.state is RunState.UNREADABLE:
        raise RunDirectoryError(status.note)
    if status.state.may_change:
        remedy = f"end it first: `python -m hpctrain cancel {directory.as_typed}`"
        raise RunDirectoryError(f"{directory.path} is {status.state}; {remedy}")
    return status


def statuses_before_launch(directories: Sequence[RunDirectory], *, force: bool = False) -> list[RunStatus]:
    """Read the statuses of runs that are to be launched; a run whose records can't be read is `unreadable`.

    SLURM is queried once for all of them.

    Raises:
        RunDirectoryError: one of them may be queued or running, and SLURM can't be reached; see `require_stopped`.
    """
    problem = ""
    jobs: Jobs | None = None
    try:
        jobs = Slurm().find(_readable_job_ids(directories))
    except SchedulerError as error:
        problem = " ".join(str(error).split())
    statuses = [_read_or_explain(directory, jobs) for directory in directories]
    for directory, status in zip(directories, statuses, strict=True):
        if jobs is None and not force and not status.state.may_change and status.job_that_may_run is not None:
            raise RunDirectoryError(
                f"{directory.path}: job {status.job_that_may_run} may still be queued or running, and SLURM can't be "
                f"asked ({problem}); run this where squeue works, or insist: `python -m hpctrain resume "
                f"{directory.as_typed} --force`"
            )
    return statuses


def ask_slurm(job_ids: Sequence[str], warn: Report = print_warning) -> Jobs | None:
    """Query SLURM for jobs, all with one command; None if SLURM can't be reached from here.

    Args:
        job_ids: of the jobs.
        warn: gets a line if SLURM is there and doesn't answer.
    """
    if not job_ids:
        return {}
    try:
        return Slurm().find(job_ids)
    except SchedulerMissingError:
        # a machine without SLURM that sees the run directories: usual, and not worth a warning
        return None
    except SchedulerError as error:
        warn(str(error))
        return None


def job_ids(directory: RunDirectory) -> list[str]:
    """The jobs of a run, from its submissions and its attempts, oldest first."""
    submitted = [record.get("job_id") for record in JobRecords(directory).read()]
    started = [attempt.job_id for attempt in Ledger(directory).attempts()]
    # one id that isn't SLURM's would spoil the query about the jobs of all runs
    ids = list(dict.fromkeys(job_id for job_id in [*submitted, *started] if job_id and JOB_ID.fullmatch(job_id)))
    # the id of a whole array covers the other runs as well
    arrays = {job_id.partition("_")[0] for job_id in ids if "_" in job_id}
    return [job_id for job_id in ids if job_id not in arrays]


def read_status(directory: RunDirectory, jobs: Jobs | None) -> RunStatus:
    """Read the status of a run.

    Args:
        directory: the run.
        jobs: SLURM's records of its jobs, see `ask_slurm`.
    """
    attempts = [_with_times(attempt, directory) for attempt in Ledger(directory).attempts()]
    facts = _facts(directory, attempts, jobs)
    state, note = derive_state(facts)
    unstarted = unstarted_job(facts) is not None
    if (unstarted or facts.attempt.attempt == 0) and state in (RunState.FAILED, RunState.INTERRUPTED):
        note = "; ".join(filter(None, [note, batch_script_error(directory, ran=state is RunState.FAILED)]))
    metrics_step, metrics_time, metrics = _last_metrics(directory.metrics)
    evaluation = last_evaluation(directory)
    saved = saved_step(directory) or None
    config = read_plain_config(directory.config)
    last = attempts[-1] if attempts else Attempt(attempt=0)
    # records after the step from which a resume started are void: the resume repeats those steps
    step = last.end_step if last.end_step is not None else max(metrics_step, last.start_step or 0)
    pending = [record for record in facts.known_jobs.values() if record.state.is_pending]
    return RunStatus(
        name=str(config.get("name") or directory.path.name),
        path=directory.path,
        state=state,
        note=note,
        step=step,
        total_steps=_total_steps(attempts, config),
        # evaluations may be too far apart to be in the tail of metrics.jsonl
        metrics={**(evaluation.means if evaluation is not None else {}), **metrics},
        metrics_time=metrics_time,
        best=None if evaluation is None else evaluation.best,
        best_step=None if evaluation is None else evaluation.best_step,
        varied=read_varied(directory),
        checkpoint_step=saved,
        set_aside=tuple(path.name for path in directory.set_aside()),
        attempts=tuple(attempts),
        account=account(attempts, JobRecords(directory).read(), state=state, saved_step=saved or 0, now=time.time()),
        verdict=last_bottleneck(directory),
        job_ids=facts.job_ids,
        may_start=pending[-1].start_time if pending and state is RunState.QUEUED else None,
        unstarted=unstarted,
        job_that_may_run=job_that_may_run(facts),
    )


def _facts(directory: RunDirectory, attempts: Sequence[Attempt], jobs: Jobs | None) -> RunFacts:
    number = Ledger(directory).last_claim()
    submissions = [
        (str(record["job_id"]), float(record["time"]))
        for record in JobRecords(directory).read()
        if record.get("job_id")
    ]
    return RunFacts(
        attempt=attempts[-1] if attempts and attempts[-1].attempt >= number else Attempt(attempt=number),
        owner=Owner.read(directory.claim(number)) if number else None,
        cancelled_at=JobRecords(directory).cancelled_at,
        job_ids=tuple(job_ids(directory)),
        submission=submissions[-1] if submissions else None,
        jobs=jobs,
    )


def _with_times(attempt: Attempt, directory: RunDirectory) -> Attempt:
    if not attempt.open:
        return attempt
    # the ledger gets an attempt's times with its end
    return replace(attempt, extra={**attempt.extra, **read_times(directory.claim(attempt.attempt))})


def _total_steps(attempts: list[Attempt], config: Mapping[str, Any]) -> int | None:
    recorded = [attempt.extra.get("total_steps") for attempt in attempts]
    trainer = config.get("trainer")
    configured = trainer.get("max_steps") if isinstance(trainer, dict) else None
    total = next((steps for steps in reversed(recorded) if steps), configured)
    return total if isinstance(total, int) and COUNT.accepts(total) else None


def _last_metrics(path: Path) -> tuple[int, float | None, dict[str, float]]:
    """Read the step and time of the last record, and the last value of each metric in the file's tail."""
    step, when = 0, None
    values: dict[str, float] = {}
    with contextlib.suppress(OSError):  # an unreadable file hides only the metrics
        for record in read_metrics(path, last_bytes=TAIL_BYTES):
            step, when = record.step, record.time
            values |= record.values
    return step, when, values

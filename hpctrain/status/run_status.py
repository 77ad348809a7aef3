"""The status of a run, from its directory and from SLURM's records of its jobs."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpctrain.config.plain_yaml import read_plain_values
from hpctrain.errors import RunDirectoryError
from hpctrain.files import describe_os_error
from hpctrain.phrases import all_of, counted, numbered
from hpctrain.run.bottleneck import Bottleneck, read_bottleneck
from hpctrain.run.checkpoints import BestCheckpoint, is_complete, saved_step
from hpctrain.run.config_change import trained_varied
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import Score, read_evaluation
from hpctrain.run.gone_checkpoints import gone_step
from hpctrain.run.launcher import Owner
from hpctrain.run.ledger import Attempt, Ledger
from hpctrain.run.reason import Reason
from hpctrain.run.record_fields import COUNT
from hpctrain.run.saves import last_save
from hpctrain.run.start_record import UnconnectedRanks
from hpctrain.scheduler.job import SlurmJob
from hpctrain.status.accounting import NOTHING, Account, account
from hpctrain.status.jobs import (
    Ask,
    Jobs,
    RunRecords,
    batch_script_error,
    ended_in_setup,
    present_jobs,
    query_jobs,
    readable_records,
)
from hpctrain.status.metrics import LoggedMetrics, last_metrics
from hpctrain.status.state import RunFacts, RunState, derive_state, job_that_may_run, unstarted_job
from hpctrain.streams import Printer, print_warning

TAIL_BYTES = 64 * 2**10
"""Bytes to read at the end of metrics.jsonl: a few hundred records."""
BRIEF_METRICS = ("train/loss", "eval/loss")
"""The metrics of a brief status."""

_SHOWN_KEYS = ("name", "run", "trainer.max_steps", "after")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The status of a run; times are epoch seconds.

    Attributes:
        name: the run's name in its configuration.
        path: its directory.
        state: its state.
        note: the reason for the state, and warnings about incomplete logs or unconnected ranks, in one line; or empty.
        command: a program's command as typed, quoted; empty for a training.
        step: the last step known to be completed; of a program, that it reported.
        total_steps: the step at which the run ends; None if only the number of epochs is known.
        metrics: the last value of each metric, NaN and infinities included.
        metrics_time: when the last of them was logged.
        best: the best value of the metric by which the run is judged; None before the first evaluation.
        best_step: its step.
        best_warning: if no checkpoint of this step is on disk, a line on that and on the best one that is; else empty.
        varied: the keys that the run's sweep varied, with the values with which it was trained; empty without a sweep.
        checkpoint_step: of the newest complete checkpoint, or of the newest save that a program reported and that still
            exists; None without one.
        gone_step: of the newest checkpoint that the run saved, if it is gone; None otherwise.
        saved_path: of that save; None for a training.
        set_aside: names of damaged checkpoints that a resume passed over.
        not_exact: why the weights may differ from those of an uninterrupted run: other ranks, or another torch.
        attempts: oldest first; an open one with the times that it has recorded so far.
        account: where the wall time went.
        bottleneck: the newest bottleneck that an attempt recorded; None without one.
        job_ids: every job of the run, oldest first.
        may_start: when a queued run is expected to start.
        unstarted: whether the newest job ended before it began an attempt, so that the last one has another job.
        job_that_may_run: the job that may still be queued or running, by the run's own records; None if no job is left.
    """

    name: str
    path: Path
    state: RunState
    note: str = ""
    command: str = ""
    step: int = 0
    total_steps: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metrics_time: float | None = None
    best: Score | None = None
    best_step: int | None = None
    best_warning: str = ""
    varied: Mapping[str, str] = field(default_factory=dict)
    checkpoint_step: int | None = None
    gone_step: int | None = None
    saved_path: str | None = None
    set_aside: tuple[str, ...] = ()
    not_exact: tuple[str, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    account: Account = NOTHING
    bottleneck: Bottleneck | None = None
    job_ids: tuple[str, ...] = ()
    may_start: float | None = None
    unstarted: bool = False
    job_that_may_run: str | None = None

    @property
    def described(self) -> str:
        """The state with its reason, as in ``queued (waiting for nodes)``."""
        return f"{self.state} ({self.note})" if self.note else str(self.state)

    @property
    def knows_step(self) -> bool:
        """Whether `step` means something: not for a program that has reported neither a step nor a save."""
        return not self.command or self.step > 0 or any(attempt.end_step for attempt in self.attempts)

    @property
    def at_step(self) -> str:
        """The words `, at step 12`; empty if the step is unknown."""
        return f", at step {self.step}" if self.knows_step else ""

    @property
    def left_s(self) -> float | None:
        """Seconds of training until the last step, at the pace of the running attempt; None if it is unknown."""
        if self.state is not RunState.RUNNING or self.total_steps is None or not self.attempts:
            return None
        running = self.attempts[-1]
        gained = self.step - (running.actual_start_step or 0)
        spent_s = running.train_s or 0.0
        return max(0, self.total_steps - self.step) * spent_s / gained if gained > 0 and spent_s > 0 else None

    @property
    def last_sign(self) -> float | None:
        """When the run last logged a metric, began an attempt or ended one; None before the first."""
        times = [when for attempt in self.attempts for when in (attempt.start_time, attempt.end_time)]
        return max((when for when in (self.metrics_time, *times) if when is not None), default=None)


def read_statuses(
    directories: Sequence[RunDirectory],
    warn: Printer = print_warning,
    *,
    brief: bool = False,
    ask: Ask | None = None,
) -> list[RunStatus]:
    """Read the statuses of runs; a run whose records can't be read is `unreadable`.

    SLURM is queried once for all of them.

    Args:
        directories: of the runs.
        warn: gets a line if SLURM is there and doesn't answer.
        brief: leave out what `read_status` leaves out.
        ask: in the place of `query_jobs`.
    """
    # one squeue for all: a sweep has hundreds of runs, and every query loads the controller
    run_records = [readable_records(directory) for directory in directories]
    jobs = (ask or query_jobs)(present_jobs(run_records), warn)
    pairs = zip(directories, run_records, strict=True)
    return [status_of(directory, jobs, records, brief=brief) for directory, records in pairs]


def status_of(
    directory: RunDirectory,
    jobs: Jobs | None,
    records: RunRecords | None = None,
    *,
    brief: bool = False,
    logged: LoggedMetrics | None = None,
) -> RunStatus:
    """Read the status of a run as `read_status`; `unreadable` if its records can't be read."""
    try:
        # what changed while SLURM was asked: a job that it no longer knows may have recorded its end
        now = RunRecords.read(directory) if records is None else records.again()
        return read_status(directory, jobs, now, brief=brief, logged=logged)
    except (OSError, RunDirectoryError) as error:
        why = describe_os_error(error) if isinstance(error, OSError) else str(error)
        return RunStatus(name=directory.path.name, path=directory.path, state=RunState.UNREADABLE, note=why)


def read_status(
    directory: RunDirectory,
    jobs: Jobs | None,
    records: RunRecords | None = None,
    *,
    brief: bool = False,
    logged: LoggedMetrics | None = None,
) -> RunStatus:
    """Read the status of a run.

    Args:
        directory: the run.
        jobs: SLURM's records of its jobs, see `query_jobs`.
        records: of the run, if they were read already.
        brief: leave out the checkpoints, the account of the wall time, the bottleneck and most metrics, which tables
            don't show.
        logged: the last metrics, if they were read already.

    Raises:
        OSError: a file of the run exists and can't be read.
        RunDirectoryError: a record has a field that can't be.
    """
    records = RunRecords.read(directory) if records is None else records
    attempts = [attempt.with_times(directory) for attempt in records.attempts]
    claims = directory.claimed_attempts()
    facts = _facts(records, attempts, jobs, claims)
    state, note = derive_state(facts)
    unstarted = facts.ended_in_setup or unstarted_job(facts) is not None
    if (unstarted or facts.attempt.attempt == 0) and state in (RunState.FAILED, RunState.INTERRUPTED):
        note = "; ".join(filter(None, [note, batch_script_error(directory, ran=state is RunState.FAILED)]))
    if logged is None:
        names = BRIEF_METRICS if brief else None
        logged = last_metrics(directory.metrics, last_bytes=TAIL_BYTES, names=names)
    evaluation = directory.newest(read_evaluation, claims)
    config = read_plain_values(directory.config, _SHOWN_KEYS)
    last = attempts[-1] if attempts else Attempt(attempt=0)
    # records after the step from which a resume started are void: the resume repeats those steps
    begun = max(last.start_step or 0, last.last_step or 0)
    step = last.end_step if last.end_step is not None else max(logged.step, begun)
    pending = [record for record in facts.known_jobs.values() if record.state.is_pending]
    if state is RunState.QUEUED and (waits_for := _waits_for(config, pending[-1], records)):
        note = f"{waits_for} ({pending[-1].reason})"
    logs = [attempt.incomplete_logs for attempt in attempts if attempt.incomplete_logs is not None]
    note = "; ".join(filter(None, [note, *logs]))
    if "run" in config and (unconnected := UnconnectedRanks.read(directory.attempt(last.attempt))) is not None:
        note = "; ".join(filter(None, [note, unconnected.text]))
    status = RunStatus(
        name=str(config.get("name") or directory.path.name),
        path=directory.path,
        state=state,
        note=note,
        command=_command(config),
        step=step,
        total_steps=_total_steps(attempts, config),
        # evaluations may be too far apart to be in the tail of metrics.jsonl
        metrics={**(evaluation.means if evaluation is not None else {}), **logged.values},
        metrics_time=logged.time,
        best=None if evaluation is None else evaluation.best,
        best_step=None if evaluation is None else evaluation.best_step,
        varied=trained_varied(directory),
        attempts=tuple(attempts),
        job_ids=facts.job_ids,
        may_start=pending[-1].start_time if pending and state is RunState.QUEUED else None,
        unstarted=unstarted,
        job_that_may_run=job_that_may_run(facts),
    )
    return status if brief else _with_details(status, records, claims, is_program="run" in config)


def _waits_for(config: Mapping[str, Any], job: SlurmJob, records: RunRecords) -> str:
    """Name the runs for which a queued job waits; empty if it waits for something else."""
    after = config.get("after")
    # it has a start time after it has looked, and after a preemption
    has_looked = bool(records.submissions) and bool(records.submissions[-1].get("waited"))
    is_waiting = job.reason == "Dependency" or (job.reason == "BeginTime" and (has_looked or not records.attempts))
    return waiting_note([str(path) for path in after]) if is_waiting and isinstance(after, list) else ""


def _with_details(status: RunStatus, records: RunRecords, claims: Sequence[int], *, is_program: bool) -> RunStatus:
    directory = records.directory
    saved = saved_step(directory) or None
    save = last_save(directory)
    # a program that reports no saves may have resumed from any step: none of its steps is known to be lost
    is_unsaved = is_program and saved is None
    attempts = [replace(attempt, start_step=None) for attempt in status.attempts] if is_unsaved else status.attempts
    saved_or_counted = status.step if is_unsaved else saved or 0
    return replace(
        status,
        best_warning=_best_warning(status, directory, saved or 0),
        checkpoint_step=saved,
        gone_step=gone_step(directory),
        saved_path=None if save is None else str(save.path),
        set_aside=tuple(path.name for path in directory.set_aside()),
        not_exact=tuple(_not_exact(status.attempts)),
        account=account(
            attempts, records.submissions, state=status.state, saved_step=saved_or_counted, now=time.time()
        ),
        bottleneck=directory.newest(read_bottleneck, claims),
    )


def _not_exact(attempts: Sequence[Attempt]) -> list[str]:
    lines: list[str] = []
    versions: dict[str, list[int]] = {}
    for attempt in attempts:
        if attempt.saved_step is not None and attempt.saved_step <= (attempt.start_step or 0):
            continue  # it saved nothing that later attempts could have resumed from
        if not attempt.start_step:  # earlier attempts have no part in the weights
            lines, versions = [], {}
        if attempt.resumed_world_size is not None:
            ranks = counted(attempt.world_size or 0, "rank")
            lines.append(
                f"from attempt {attempt.attempt} on: {ranks} resumed from a checkpoint of "
                f"{attempt.resumed_world_size}; the samples of each step are the same"
            )
        if attempt.torch is not None:
            versions.setdefault(attempt.torch, []).append(attempt.attempt)
    if len(versions) > 1:
        places = [f"torch {version} in {numbered('attempt', numbers)}" for version, numbers in versions.items()]
        lines.append(f"{'; '.join(places)}: the weights may differ from those of a run with one version")
    return lines


def _best_warning(status: RunStatus, directory: RunDirectory, saved_step: int) -> str:
    """Warn if the best checkpoint isn't on disk, unless a live run may be about to write it."""
    step = status.best_step
    if step is None or is_complete(directory.checkpoint(step), step) or (status.state.may_change and step > saved_step):
        return ""
    return BestCheckpoint.of(directory).warning


def _facts(records: RunRecords, attempts: Sequence[Attempt], jobs: Jobs | None, claims: Sequence[int]) -> RunFacts:
    number = max(claims, default=0)
    attempt = attempts[-1] if attempts and attempts[-1].attempt >= number else Attempt(attempt=number)
    return RunFacts(
        attempt=attempt,
        owner=Owner.read(records.directory.attempt(number)) if number else None,
        cancelled_at=records.cancelled_at,
        job_ids=records.job_ids,
        left_jobs=records.left_jobs,
        submission=records.submission,
        # the log is read last: `status` of many runs would read as many logs
        ended_in_setup=_is_over(records, attempt, jobs) and ended_in_setup(records.directory),
        jobs=jobs,
    )


def _is_over(records: RunRecords, attempt: Attempt, jobs: Jobs | None) -> bool:
    """Whether the newest job is over, and the newest attempt isn't known to have ended the run in it."""
    newest = records.job_ids[-1] if records.job_ids else None
    if newest is None or newest in records.left_jobs or newest not in (jobs or {}):
        return False
    record = (jobs or {})[newest]
    if record is not None and (record.state.is_pending or record.state.is_running):
        return False
    return attempt.may_continue or attempt.job_id != newest


def _total_steps(attempts: list[Attempt], config: Mapping[str, Any]) -> int | None:
    recorded = [attempt.total_steps for attempt in attempts]
    total = next((steps for steps in reversed(recorded) if steps), config.get("trainer.max_steps"))
    return total if isinstance(total, int) and COUNT.accepts(total) else None


def _command(config: Mapping[str, Any]) -> str:
    run = config.get("run")
    words = run.get("command") if isinstance(run, dict) else None
    return shlex.join(map(str, words)) if isinstance(words, list) else ""


def waiting_note(paths: Sequence[str]) -> str:
    """Name the runs that haven't completed, by their ledgers alone; empty if all have, or can't be read."""
    names = []
    for directory in map(RunDirectory.at, paths):
        with contextlib.suppress(OSError, RunDirectoryError):
            attempts = Ledger(directory).attempts()
            reason = attempts[-1].reason if attempts else None
            if reason is not Reason.COMPLETED:
                has_stopped = reason is not None and not reason.meaning.requeued
                names.append(f"{directory.as_typed} ({reason})" if has_stopped else directory.as_typed)
    phrases = names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]
    return f"it waits for {all_of(phrases)} to complete" if names else ""

"""How an attempt ended, judged from outside by the ranks' exit records, never by a code that came through srun."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.attempt.hang_report import hang_report
from hpctrain.errors import ExitCode
from hpctrain.phrases import listed
from hpctrain.retry import until_it_can
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import ExitRecord, first_cause, read_exit_records
from hpctrain.run.ledger import Attempt, Ledger
from hpctrain.run.reason import Reason

OUT_OF_MEMORY = re.compile(r"out of memory|oom.kill", re.IGNORECASE)
"""What srun and slurmstepd say of a rank that the kernel killed for its memory."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """An attempt's end, for the user and for whoever waits.

    Attributes:
        reason: why it ended.
        step: the last step known to be completed.
        report: lines for the user; empty when all went well.
        suspects: nodes that the failure points at, where SLURM names them.
        suspect_rank: whose node the failure points at.
        silent_ranks: ranks that left no record.
        stop_signal: number of the signal that had asked the rank that failed to stop; None where none had.
        error_after_signal: the rank raised an error, but SLURM was taking the job away, which is the likelier cause.
    """

    reason: Reason
    step: int
    report: str
    suspects: tuple[str, ...] = ()
    suspect_rank: int | None = None
    silent_ranks: tuple[int, ...] = ()
    stop_signal: int | None = None
    error_after_signal: bool = False

    @property
    def exit_code(self) -> ExitCode:
        """Of the command or batch script."""
        return self.reason.meaning.exit_code


def judge(records: Mapping[int, ExitRecord], world_size: int, last_step: int, witness: str = "") -> Outcome:
    """The outcome that the exit records tell.

    Args:
        records: by rank; a rank without one died without a word.
        world_size: how many there should be.
        last_step: known from elsewhere, such as the newest checkpoint.
        witness: what the launcher of the ranks said of their ends.
    """
    step = max([last_step, *(record.step for record in records.values())])
    silent = [rank for rank in range(world_size) if rank not in records]
    cause = first_cause(records)
    if cause is not None and cause.reason is Reason.HANG:
        return Outcome(Reason.HANG, step, hang_report(records, silent), silent_ranks=tuple(silent))
    if cause is not None and not (cause.blames_peer and silent):
        suspect = cause.rank if points_at_its_node(cause) else None
        return Outcome(cause.reason, step, describe(cause), suspect_rank=suspect, stop_signal=cause.stop_signal)
    stopped = [
        record.reason
        for record in records.values()
        if record.reason.meaning.orderly and record.reason is not Reason.COMPLETED
    ]
    if stopped:
        # such a record is written behind a barrier that all ranks passed with everything saved
        reason = next((found for found in stopped if found is not Reason.INTERRUPTED), Reason.INTERRUPTED)
        return Outcome(reason, step, f"stopped after step {step} ({reason.value})")
    if silent:
        said = f": {witness}" if witness else " (killed from outside?)"
        reason = Reason.OUT_OF_MEMORY if OUT_OF_MEMORY.search(witness) else Reason.INFRASTRUCTURE
        found = f"rank {listed(silent)} of {world_size} ended without a word{said}; see its log"
        return Outcome(reason, step, found, silent_ranks=tuple(silent))
    return Outcome(Reason.COMPLETED, step, "")


def points_at_its_node(record: ExitRecord) -> bool:
    """Whether the machine of the rank is to blame, and not a lost peer."""
    return record.reason.meaning.machine_failure and not record.blames_peer and record.reason is not Reason.HANG


def describe(record: ExitRecord) -> str:
    """Host, rank and traceback of a rank that failed."""
    head = f"rank {record.rank} on {record.host} failed after step {record.step}: {record.message}"
    return f"{head}\n{record.traceback.rstrip()}" if record.traceback else head


def resume_command(directory: RunDirectory) -> str:
    """What the user may type to go on."""
    return f"python -m hpctrain resume {directory.as_typed}"


def judge_attempt(directory: RunDirectory, attempt: int, world_size: int, witness: str = "") -> Outcome:
    """Judge an attempt whose ranks are gone."""
    records = read_exit_records(directory.claim(attempt))
    return judge(records, world_size, directory.saved_step, witness)


def conclude(directory: RunDirectory, attempt: int, world_size: int) -> Outcome:
    """Judge an attempt whose ranks are gone, and close it in the ledger."""
    outcome = judge_attempt(directory, attempt, world_size)
    close(directory, attempt, world_size, outcome)
    return outcome


def close(
    directory: RunDirectory,
    attempt: int,
    world_size: int,
    outcome: Outcome,
    *,
    job_id: str | None = None,
    nodes: Sequence[str] = (),
    **extra: object,
) -> None:
    """Record the end; and the start as well where the ranks never got so far."""
    ledger = Ledger(directory)
    entry = entry_of(ledger, attempt)
    if not entry.open:
        return
    if entry.start_time is None:
        ledger.start(attempt, job_id=job_id, nodes=nodes, world_size=world_size, step=directory.saved_step)
    detail = outcome.report.splitlines()[0] if outcome.report else ""
    ledger.end(
        attempt, reason=outcome.reason, step=outcome.step, detail=detail, saved_step=directory.saved_step, **extra
    )


def close_patiently(patience_s: float, directory: RunDirectory, attempt: int, *told: Any, **extra: Any) -> None:
    """`close`; a file system that refuses gets so many seconds, and then the next attempt closes this one."""
    complaint = f"the end of attempt {attempt} can't be recorded"
    with contextlib.suppress(OSError):
        until_it_can(lambda: close(directory, attempt, *told, **extra), patience_s, complaint)


def entry_of(ledger: Ledger, attempt: int) -> Attempt:
    """What the ledger has of an attempt so far."""
    return next((entry for entry in ledger.attempts() if entry.attempt == attempt), Attempt(attempt=attempt))


def completed_by(ledger: Ledger, job_id: str | None) -> bool:
    """Whether this very job has completed the run: it was requeued after all. Who makes a run longer submits anew."""
    last = next(reversed(ledger.attempts()), None)
    return last is not None and last.reason is Reason.COMPLETED and last.job_id == job_id is not None

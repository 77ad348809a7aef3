"""Attempts that ended without an end record: the next attempt closes them, with the cause that SLURM gives."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from hpctrain.attempt.out_of_memory import with_memory_advice
from hpctrain.attempt.outcome import Outcome, record_end
from hpctrain.attempt.termination import Termination
from hpctrain.config.stored import load_run
from hpctrain.errors import HpctrainError, SchedulerError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import first_cause, read_exit_records
from hpctrain.run.job_records import JobRecords
from hpctrain.run.launcher import Owner
from hpctrain.run.ledger import Attempt, EndFacts, Ledger
from hpctrain.run.reason import Reason
from hpctrain.scheduler.slurm import Slurm

T = TypeVar("T")

log = logging.getLogger("hpctrain.attempt")


@dataclass(frozen=True, slots=True)
class UnrecordedEnds:
    """Closes a run's attempts that have no end yet, before a new attempt begins.

    Attributes:
        directory: the run.
        slurm: queries their jobs.
        job_id: the job that the new attempt runs in; None outside of SLURM.
        restarts: how often that job had been requeued.
    """

    directory: RunDirectory
    slurm: Slurm
    job_id: str | None = None
    restarts: int = 0

    def close(self, world_size: int) -> None:
        """Record an end for every open attempt.

        Args:
            world_size: assumed for an attempt that never recorded its own.

        Raises:
            OSError: the ledger can't be written.
        """
        ledger = Ledger(self.directory)
        entries = {entry.attempt: entry for entry in ledger.attempts()}
        for number in range(1, ledger.last_claim() + 1):
            entry = entries.get(number, Attempt(attempt=number, world_size=world_size))
            if entry.open:
                self._close(replace(entry, world_size=entry.world_size or world_size))

    def _close(self, entry: Attempt) -> None:
        assert entry.world_size is not None
        outcome = Outcome.of_attempt(self.directory, entry.attempt, entry.world_size)
        if outcome.silent_ranks:
            outcome = self._explain(entry, outcome)
        if outcome.reason is Reason.OUT_OF_MEMORY:
            with contextlib.suppress(HpctrainError, OSError):
                outcome = with_memory_advice(outcome, load_run(self.directory.config))
        ended = f"{outcome.reason.value} at step {outcome.step} ({outcome.headline})"
        log.info("closing attempt %d, which recorded no end: %s", entry.attempt, ended)
        # hpctrain closes an attempt before it asks for a requeue, so this one was SLURM's own
        facts = EndFacts(requeued_by="slurm" if self._requeued(entry) else None, closed_late=True)
        # the configuration may have been changed since then, for the attempt that is about to begin
        record_end(self.directory, entry.attempt, outcome, world_size=entry.world_size, ends_run=False, facts=facts)

    def _requeued(self, entry: Attempt) -> bool:
        """Whether the attempt ran in this very job, before it was requeued."""
        if self.job_id is None or entry.job_id not in (None, self.job_id):
            return False
        # an attempt whose ranks never got as far as the ledger recorded neither its job nor the count
        before = JobRecords(self.directory).restarts_before(self.job_id)
        return (before if entry.restart_count is None else entry.restart_count) < self.restarts

    def _explain(self, entry: Attempt, outcome: Outcome) -> Outcome:
        """Replace the outcome by SLURM's explanation of why ranks left no record."""
        claim = self.directory.attempt(entry.attempt)
        termination = Termination.read(claim)
        if termination is None or not termination.killing:  # if it wasn't, something else may have come first
            termination = self._ask(entry)
        assert termination.reason is not None
        if outcome.reason is Reason.HANG:
            # Ranks that wait in vain may do so because of a dead node. So a recorded hang gives way to what SLURM
            # knows for certain, unless a rank was stuck on its own and not waiting for others.
            cause = first_cause(read_exit_records(claim))
            if not termination.certain or cause is None or not cause.blames_peer:
                return outcome
        return Outcome(termination.reason, outcome.step, f"ended without a record: {termination.evidence}")

    def _ask(self, entry: Attempt) -> Termination:
        owner = Owner.read(self.directory.attempt(entry.attempt))
        # a program outlives its runs
        if owner is not None and owner.alive and not owner.in_program and owner.pid != os.getpid():
            return _likely(Reason.INTERRUPTED, f"process {owner.pid} still runs, and this attempt takes over from it")
        if self._requeued(entry):
            return self._ask_before_requeue(entry)
        if entry.job_id is None or entry.job_id == self.job_id:
            why = "its processes were killed (perhaps for lack of memory) or crashed, or their machine stopped"
            return _likely(Reason.INFRASTRUCTURE, why)
        job_id = entry.job_id
        record = _ask_or_none(lambda: self.slurm.find([job_id])[job_id])
        if record is None:
            return _likely(Reason.INFRASTRUCTURE, f"SLURM no longer knows job {job_id}")
        if not record.state.is_finished:
            return _likely(Reason.INTERRUPTED, f"job {job_id} still exists, and this attempt takes over from it")
        unknown = _likely(Reason.INFRASTRUCTURE, f"SLURM no longer knows why job {job_id} ended")
        return Termination.of_ended(record.state) or unknown

    def _ask_before_requeue(self, entry: Attempt) -> Termination:
        """Explain the end of an attempt in this same job, which SLURM requeued, by accounting or by failed nodes."""
        job_id = entry.job_id or self.job_id
        assert job_id is not None
        record = _ask_or_none(lambda: self.slurm.before_requeue(job_id))
        if record is not None and (termination := Termination.of_ended(record.state)):
            return termination
        requeued = _likely(Reason.NODE_FAILURE, "SLURM requeued the job")
        if not entry.nodes:
            return requeued
        failed = _ask_or_none(lambda: self.slurm.failed_nodes(entry.nodes, entry.start_time or 0.0))
        if failed is None:
            return requeued
        if failed:
            return Termination(Reason.NODE_FAILURE, f"{' '.join(failed)} failed, and SLURM requeued the job")
        why = "SLURM requeued the job, and its nodes are up: there was no time to record the end"
        return _likely(Reason.PREEMPTED, why)


def _likely(reason: Reason, why: str) -> Termination:
    return Termination(reason, why, certain=False)


def _ask_or_none(question: Callable[[], T | None]) -> T | None:
    try:
        return question()
    except SchedulerError as error:
        log.info("SLURM gives no cause: %s", error)
        return None

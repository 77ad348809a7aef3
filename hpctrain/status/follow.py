"""Following submitted runs to their end: their states, rank zero's output, and the exit code."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

from hpctrain.attempt.outcome import describe
from hpctrain.errors import ExitCode, SchedulerError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import first_cause, read_exit_records
from hpctrain.run.ledger import Ledger
from hpctrain.scheduler.explain import explain_pending
from hpctrain.scheduler.job import JobRecord
from hpctrain.scheduler.slurm import Slurm

POLL_S = 1.0
SETTLE_S = 15.0
"""Seconds that a finished job's last words may take to cross a shared file system."""


@dataclass
class Follower:
    """Follows one run.

    Args:
        directory: the run.
        job_id: its job.
        seen_bytes: how much of rank zero's log, from earlier attempts, is not shown again.
        slurm: who is asked.
        out: where output goes.
        sleep: waits so many seconds.
    """

    directory: RunDirectory
    job_id: str
    seen_bytes: int = 0
    slurm: Slurm = field(default_factory=Slurm)
    out: TextIO = field(default_factory=lambda: sys.stdout)
    sleep: Callable[[float], None] = time.sleep

    def follow(self) -> int:
        """Print what happens until the job is over.

        Returns:
            The run's `ExitCode`.
        """
        said, position, unanswered, patience = "", self.seen_bytes, 0, SETTLE_S
        while True:
            position = self._copy_log(position)
            try:
                record = self.slurm.find([self.job_id])[self.job_id]
                unanswered = 0
            except SchedulerError as error:
                unanswered += 1
                if unanswered == 1:
                    self._say(f"SLURM doesn't answer ({error}); asking again")
                self.sleep(POLL_S * min(unanswered, 30))
                continue
            said = self._say_state(record, said)
            if record is None or record.state.is_finished:
                if successor := self._successor():
                    self.job_id, patience = successor, SETTLE_S
                    self._say(f"the run goes on in job {successor}")
                    continue
                if not self._goes_on() or patience <= 0:
                    self._copy_log(position)
                    return self._finish(record)
                patience -= POLL_S
            self.sleep(POLL_S)

    def _successor(self) -> str | None:
        """The job that was submitted for the run after this one."""
        ids = [str(job["job_id"]) for job in self.directory.job_records() if "job_id" in job]
        return ids[-1] if self.job_id in ids[:-1] else None

    def _goes_on(self) -> bool:
        """Whether the newest attempt ended with a word that another one follows."""
        last = next(reversed(Ledger(self.directory).attempts()), None)
        return last is not None and "next" in last.extra

    def _copy_log(self, position: int) -> int:
        try:
            with self.directory.rank_log(0).open("rb") as log:
                log.seek(position)
                data = log.read()
        except FileNotFoundError:
            return position
        if data:
            self.out.write(data.decode(errors="replace"))
            self.out.flush()
        return position + len(data)

    def _say_state(self, record: JobRecord | None, said: str) -> str:
        if record is None:
            return said
        if record.state.is_pending:
            text = f"job {self.job_id} is queued: {explain_pending(record.reason)}"
        else:
            text = f"job {self.job_id} is {record.state.value.lower()}"
            if record.nodes and record.state.is_running:
                text += f" on {' '.join(record.nodes)}"
        if text != said:
            self._say(text)
        return text

    def _say(self, text: str) -> None:
        self.out.write(f"hpctrain: {text}\n")
        self.out.flush()

    def _finish(self, record: JobRecord | None) -> int:
        ledger, deadline = Ledger(self.directory), time.monotonic() + SETTLE_S
        attempts = ledger.attempts()
        while (not attempts or attempts[-1].open) and time.monotonic() < deadline:
            if record is not None and record.state.value == "CANCELLED":
                break
            self.sleep(POLL_S / 4)
            attempts = ledger.attempts()
        if not attempts or attempts[-1].reason is None:
            return self._without_end(record)
        last = attempts[-1]
        assert last.reason is not None
        code = last.reason.meaning.exit_code
        self._say(f"{last.reason} at step {last.end_step}; run directory {self.directory.path}")
        if code is not ExitCode.FINISHED:
            self._blame(last.attempt, last.detail)
        return code

    def _blame(self, attempt: int, detail: str) -> None:
        cause = first_cause(read_exit_records(self.directory.claim(attempt)))
        self._say(describe(cause) if cause and not cause.blames_peer else detail)
        self._say(f"to go on: python -m hpctrain resume {self.directory.as_typed}")

    def _without_end(self, record: JobRecord | None) -> int:
        state = "gone" if record is None else record.state.value
        if state == "CANCELLED":
            self._say(f"job {self.job_id} was cancelled; to go on: python -m hpctrain resume {self.directory.as_typed}")
            return ExitCode.CANCELLED
        logs = [str(job["log"]) for job in self.directory.job_records() if "log" in job]
        self._say(f"job {self.job_id} is {state} and left no word; see {logs[-1] if logs else self.directory.logs}")
        return ExitCode.FAILED

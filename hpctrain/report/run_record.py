"""What a run's page is made of: its status, its curves, and when each attempt was at work."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hpctrain.config.plain_yaml import read_plain_config
from hpctrain.phrases import counted, duration
from hpctrain.report.frame import Band, Mark
from hpctrain.results.curves import Curve, read_curves
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Attempt
from hpctrain.status.accounting import AttemptAccount
from hpctrain.status.run_status import RunStatus, read_statuses
from hpctrain.status.state import RunState


@dataclass(frozen=True, slots=True)
class AttemptSpan:
    """When an attempt was queued and at work.

    Attributes:
        attempt: its records.
        account: where its time went.
        begin: epoch seconds, of its time in the queue.
        end: epoch seconds; of a running attempt, now.
    """

    attempt: Attempt
    account: AttemptAccount
    begin: float
    end: float


@dataclass(frozen=True)
class RunRecord:
    """A run as its page shows it.

    Attributes:
        directory: of the run.
        status: of the run.
        curves: by name.
    """

    directory: RunDirectory
    status: RunStatus
    curves: Mapping[str, Curve]

    @classmethod
    def read(cls, directory: RunDirectory) -> RunRecord:
        """Read a run, which may be training at the same time."""
        (status,) = read_statuses([directory])
        # a program drops records by itself, and what it resumed from is known only if it reported that
        is_program = "run" in read_plain_config(directory.config)
        attempts = () if is_program else status.attempts
        return cls(directory, status, read_curves(directory.metrics, attempts=attempts))

    @cached_property
    def spans(self) -> Sequence[AttemptSpan]:
        """Of the attempts whose times are known, oldest first."""
        accounts = {one.attempt: one for one in self.status.account.attempts}
        found = []
        for attempt in self.status.attempts:
            account = accounts[attempt.attempt]
            is_running = attempt.open and attempt is self.status.attempts[-1] and self.status.state is RunState.RUNNING
            end = time.time() if is_running else _end(attempt)
            if end is not None:
                found.append(AttemptSpan(attempt, account, end - account.spent.total_s, end))
        return found

    @cached_property
    def origin(self) -> float:
        """Epoch seconds at which time begins in its charts: the first attempt, or the first record."""
        begins = [span.begin for span in self.spans]
        logged = [curve.times[0] for curve in self.curves.values() if curve.times]
        return min([*begins, *(when for when in logged if when == when)], default=time.time())  # noqa: PLR0124 - not NaN

    @cached_property
    def marks(self) -> Sequence[Mark]:
        """Where attempts resumed, over steps; and where the last one ended, if it didn't complete."""
        attempts = self.status.attempts
        marks = [
            Mark(attempt.actual_start_step, f"\u25b8{attempt.attempt}", self._resumed(before, attempt))
            for before, attempt in itertools.pairwise(attempts)
            if attempt.actual_start_step is not None
        ]
        last = attempts[-1] if attempts else None
        if last is not None and last.reason is not None and last.end_step and last.reason.meaning.exit_code:
            title = f"attempt {last.attempt} ended at step {last.end_step}: {last.reason}"
            marks.append(Mark(last.end_step, "\u25a0", title))
        return marks

    @cached_property
    def repeated(self) -> Sequence[Band]:
        """Stretches of steps that were repeated after a resume."""
        attempts = self.status.attempts
        bands = []
        for before, attempt in itertools.pairwise(attempts):
            first, last = attempt.actual_start_step, before.reached_step
            if first is not None and last is not None and first < last:
                title = f"attempt {attempt.attempt} repeated {counted(last - first, 'step')}, from step {first} on"
                bands.append(Band(first, last, title))
        return bands

    @staticmethod
    def _resumed(before: Attempt, attempt: Attempt) -> str:
        why = before.reason or "no recorded end"
        pause = ""
        if before.end_time is not None and attempt.start_time is not None:
            pause = f", {duration(attempt.start_time - before.end_time)} later"
        resumed = f"attempt {attempt.attempt} resumed from step {attempt.actual_start_step}"
        return f"attempt {before.attempt} ended: {why}; {resumed}{pause}"


def _end(attempt: Attempt) -> float | None:
    known = (attempt.died_at, attempt.seen, attempt.start_time, attempt.end_time)
    return next((moment for moment in known if moment is not None), None)

"""The sender: it hands the rows of a run to a service, in order, and keeps the cursor."""

from __future__ import annotations

import time

from hpctrain.run.directory import RunDirectory
from hpctrain.sync.claim import SenderClaim
from hpctrain.sync.cursor import NOTHING, Cursor
from hpctrain.sync.description import describe, describe_state
from hpctrain.sync.identity import identify
from hpctrain.sync.rows import Rows
from hpctrain.sync.service import Service

BATCH_ROWS = 200
"""Rows between two writes of the cursor."""


class Sender:
    """Sends one run to one service; the caller holds the claim.

    Args:
        directory: of the run.
        name: of the service.
        service: its client.
        claim: held.
        rows: those that an earlier sender of this process left, to be continued; None to read all.

    Attributes:
        num_sent: rows that this sender handed over.
    """

    def __init__(
        self, directory: RunDirectory, name: str, service: Service, claim: SenderClaim, rows: Rows | None = None
    ) -> None:
        self.num_sent = 0
        self._directory = directory
        self._name = name
        self._service = service
        self._claim = claim
        self._run = describe(directory, identify(directory))
        self._rows = Rows(directory, NOTHING) if rows is None else rows
        cursor = Cursor.read(directory, name)
        is_copied = cursor.digest not in ("", self._run.digest)
        self._use(Cursor() if is_copied else cursor)

    @property
    def destination(self) -> str:
        """Where the service has the run.

        Raises:
            ServiceSetupError: no server is known.
        """
        return self._service.destination(self._run)

    def is_up_to_date(self, limit: int | None, state: str) -> bool:
        """Return whether an earlier sender has sent all rows before a step, and reported the run's state.

        Args:
            limit: the step; None for all.
            state: as `status` names it.

        Raises:
            ServiceSetupError: no server is known.
        """
        self._rows.read()
        cursor = self._cursor
        if cursor.destination != self.destination:
            return False
        waiting = any(row.step > cursor.after for row in self._rows.before(limit))
        return not waiting and cursor.state == state and cursor.handed_over_step is None

    def open(self) -> str:
        """Find or make the run at the service; return the address of its page, or an empty text.

        A cursor of another destination is ignored. If the service has fewer rows than the cursor records, the service
        is right: the run may have been deleted there.

        Raises:
            ServiceError: the service can't be reached, or refuses.
            ServiceSetupError: no server is known.
        """
        destination = self.destination
        if self._cursor.destination not in ("", destination):
            self._use(Cursor())
        cursor = self._cursor
        opened = self._service.open(self._run, cursor.run_id)
        if opened.last_step is not None and opened.last_step < cursor.after:
            cursor.confirmed_step = None if opened.last_step == NOTHING else opened.last_step
            self._use(cursor)
        cursor.run_id = opened.run_id
        cursor.address = opened.address
        cursor.digest = self._run.digest
        cursor.destination = destination
        self._write()
        return opened.address

    def send(self, limit: int | None) -> int:
        """Send the rows before a step, or all of them.

        Args:
            limit: the step; None for all.

        Returns:
            How many rows were sent.

        Raises:
            BusyError: another process took over.
            ServiceError: the service can't be reached, or refuses.
            OSError: the file system's error.
        """
        self._rows.read()
        rows = self._rows.before(limit)
        for first in range(0, len(rows), BATCH_ROWS):
            batch = rows[first : first + BATCH_ROWS]
            last = batch[-1].step
            self._claim.require()
            self._cursor.handed_over_step = last
            self._cursor.complete = False
            self._write()
            self._service.send(batch, in_doubt=batch[0].step <= self._doubtful_step)
            self._handed_over = last
            self._rows.taken(batch)
            self.num_sent += len(batch)
            if not self._service.confirms_at_close:
                self._confirm(last)
        return len(rows)

    def close(self, state: str) -> None:
        """Report the run's state, and wait until the service has everything.

        Args:
            state: as `status` names it.

        Raises:
            ServiceError: the service can't be reached, refuses, or didn't take everything in time.
            OSError: the file system's error.
        """
        self._claim.require()
        reported = describe_state(self._directory, state)
        self._service.close(reported)
        self._rows.read()
        cursor = self._cursor
        cursor.state = state
        cursor.problem = ""
        cursor.complete = reported.final and self._rows.last_step is None
        self._confirm(self._handed_over)

    def fail(self, problem: str) -> None:
        """Leave the service, and record why.

        Args:
            problem: in one line.
        """
        self._service.abandon()
        self._cursor.problem = problem
        self._write()

    def abandon(self) -> None:
        """Leave the service, without a record: another process owns the cursor."""
        self._service.abandon()

    @property
    def sent_step(self) -> int | None:
        """The step up to which rows were handed over; None before the first."""
        step = max(self._handed_over, self._cursor.after)
        return None if step == NOTHING else step

    @property
    def next_step(self) -> int | None:
        """The step of the first row that waits; None if none does."""
        return next((row.step for row in self._rows), None)

    def _use(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._doubtful_step = NOTHING if cursor.handed_over_step is None else cursor.handed_over_step
        self._rows.continue_after(cursor.after)
        self._handed_over = cursor.after

    def _confirm(self, step: int) -> None:
        if step != NOTHING:
            self._cursor.confirmed_step = step
        self._cursor.handed_over_step = None
        self._write()

    def _write(self) -> None:
        self._cursor.time = time.time()
        self._cursor.write(self._directory, self._name)

"""The ledger of a run: which attempt owns it, and how each attempt ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpctrain.errors import RunDirectoryUnavailableError, SupersededError
from hpctrain.files import append_json_line, fsync_directory, read_json_lines
from hpctrain.run.directory import RunDirectory
from hpctrain.run.disk_reserve import release, reserve, write_with_reserve
from hpctrain.run.file_system import explain
from hpctrain.run.reason import Reason
from hpctrain.run.record_fields import COUNT, NUMBER, RANKS, TEXT, TEXTS, TIME, require_fields
from hpctrain.run.secret import discard_secret, write_secret
from hpctrain.run.times import SPENT, read_times

BETWEEN_MARK_AND_RECORD_S = 5.0
"""Seconds that a busy machine may take between an end's marker and its record; the first marker's record counts."""

_FIELD_TYPES = {
    "job_id": TEXT,
    "nodes": TEXTS,
    "world_size": RANKS,
    "step": COUNT,
    "time": TIME,
    "reason": TEXT,
    "detail": TEXT,
    "restart_count": COUNT,
    "total_steps": COUNT,
    "resumed_world_size": RANKS,
    "launched": TIME,
    "code": TEXT,
    "gpu": TEXT,
    "torch": TEXT,
    "seen": TIME,
    **dict.fromkeys((*SPENT, "last_step", "resumed_step"), NUMBER),
    **dict.fromkeys(("saved_step", "keep_best"), COUNT),
    "suspects": TEXTS,
    "exclude": TEXTS,
    "next": TEXT,
    "requeued_by": TEXT,
    "after": TEXT,
    "incomplete_logs": TEXT,
}
_FIELDS = {"start": ("job_id", "nodes", "world_size"), "end": ("reason", "detail")}
"""Fields of `Attempt` by the event that records them; each event also has a step and a time. Others go into `extra`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt as recorded in the ledger; times are epoch seconds, None if not recorded."""

    attempt: int
    job_id: str | None = None
    nodes: tuple[str, ...] = ()
    world_size: int | None = None
    start_step: int | None = None
    start_time: float | None = None
    reason: Reason | None = None
    end_step: int | None = None
    end_time: float | None = None
    detail: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        """Whether no end was recorded: the attempt is running, or was killed."""
        return self.reason is None

    @property
    def resumed_step(self) -> int | None:
        """The step from which it resumed: the recorded start, unless a program's first report shows another one."""
        reported = self.extra.get("resumed_step")
        return self.start_step if reported is None else int(reported)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Attempts of one run, in ``attempts.jsonl`` and the claims next to it.

    An attempt owns the run from the moment at which it makes its claim, a directory named by its number, until a later
    claim exists: `mkdir` is atomic, on a shared file system too. Call `require_ownership` before anything is published.
    """

    directory: RunDirectory
    clock: Callable[[], float] = time.time

    def attempts(self) -> list[Attempt]:
        """All attempts, oldest first; if an attempt has several ends, the first counts.

        Raises:
            RunDirectoryError: a record has a field that can't be.
        """
        found: dict[int, dict[str, Any]] = {}
        path = self.directory.attempts
        for record in read_json_lines(path):
            number = record.get("attempt")
            if not isinstance(number, int) or not COUNT.accepts(number):
                continue
            require_fields(path, record, _FIELD_TYPES)
            fields = found.setdefault(number, {"extra": {}})
            event = str(record.get("event"))
            names = _FIELDS.get(event)
            if names is None or f"{event}_time" in fields:
                continue
            fields |= {name: record.get(name) for name in names}
            fields |= {f"{event}_{name}": record.get(name) for name in ("step", "time")}
            own = {"attempt", "event", "step", "time", *names}
            extra = {name: value for name, value in record.items() if name not in own and value is not None}
            if event == "start":
                fields["nodes"] = tuple(fields["nodes"] or ())
                fields["extra"] = extra | fields["extra"]  # an end that was recorded first knows more
            else:
                fields["reason"], fields["detail"] = _reason(record)
                fields["extra"] |= extra
        return [Attempt(attempt=number, **fields) for number, fields in sorted(found.items())]

    def attempt(self, number: int) -> Attempt:
        """The records of one attempt so far."""
        return next((entry for entry in self.attempts() if entry.attempt == number), Attempt(attempt=number))

    def last_claim(self) -> int:
        """The number of the newest claim; 0 before the first attempt."""
        return max(self.directory.claimed_attempts(), default=0)

    def claim(self, *, secret: bool = False) -> int:
        """Claim the run for a new attempt.

        Args:
            secret: also write one into the claim, by which the attempt's ranks recognise each other.

        Returns:
            The attempt's number, counted from 1.

        Raises:
            RunDirectoryUnavailableError: the run directory is gone or can't be written.
        """
        try:
            number = self._make_claim(secret=secret)
        except OSError as error:
            raise RunDirectoryUnavailableError(
                f"{self.directory.path}: a new attempt can't be claimed ({explain(error, self.directory.path)}); "
                "check that the run directory exists and is writable"
            ) from error
        return number

    def _make_claim(self, *, secret: bool) -> int:
        number = self.last_claim()
        while True:
            number += 1
            claim = self.directory.claim(number)
            try:
                claim.mkdir()
            except FileExistsError:
                continue
            try:
                if number > 1:
                    self.directory.claim(number - 1).mkdir(exist_ok=True)  # it may have been taken back meanwhile
                fsync_directory(self.directory.claims)
                if secret:
                    write_secret(claim)
                # without that, an attempt on a full disk would have no end
                reserve(claim)
            except OSError:
                self._take_back(number)
                raise
            return number

    def _take_back(self, number: int) -> None:
        """Remove a claim, which would count as an attempt that was killed, unless there is a later one."""
        claim = self.directory.claim(number)
        discard_secret(claim)
        with contextlib.suppress(OSError):
            claim.rmdir()
            # looking first would leave a gap, if the later claim were made in between
            if self.directory.claim(number + 1).exists():
                claim.mkdir()

    def owns(self, attempt: int) -> bool:
        """Whether no later attempt has claimed the run."""
        # claims have no gaps, and this runs before each publish: one stat instead of a listing
        return not self.directory.claim(attempt + 1).exists()

    def require_ownership(self, attempt: int) -> None:
        """Raise if the attempt is superseded, before it writes.

        Raises:
            SupersededError: a later attempt owns the run.
        """
        if not self.owns(attempt):
            raise SupersededError(
                f"attempt {attempt} of {self.directory.path} was superseded by attempt {self.last_claim()}: "
                "it stops here and writes nothing more"
            )

    def start(
        self, attempt: int, *, job_id: str | None, nodes: Sequence[str], world_size: int, step: int, **extra: object
    ) -> None:
        """Record that the ranks of an attempt begin at ``step``."""
        append_json_line(
            self.directory.attempts,
            {
                "event": "start",
                "attempt": attempt,
                "job_id": job_id,
                "nodes": list(nodes),
                "world_size": world_size,
                "step": step,
                "time": self.clock(),
                **extra,
            },
            durable=True,
        )

    def end(self, attempt: int, *, reason: Reason, step: int, detail: str = "", **extra: object) -> None:
        """Record why an attempt ended, with its recorded times; the first record counts.

        Raises:
            OSError: the record can't be written, even with the reserved disk space.
        """
        claim = self.directory.claim(attempt)
        record = {"event": "end", "attempt": attempt, "reason": reason.value, "step": step, "time": self.clock()}
        if detail:
            record["detail"] = detail
        write_with_reserve(claim, lambda: self._end(attempt, {**record, **read_times(claim), **extra}))
        release(claim)

    def _end(self, attempt: int, record: dict[str, Any]) -> None:
        # Ranks that were started by hand end at the same moment on several nodes. Over NFS, appends from two nodes may
        # overwrite each other, while only one of them can make this file.
        try:
            (self.directory.claim(attempt) / "ended").open("x").close()
        except FileExistsError:
            if self._is_closed_soon(attempt):
                return
            # the process that made the marker was killed, or the disk was full, before it wrote the record
        append_json_line(self.directory.attempts, record, durable=True)

    def _is_closed_soon(self, attempt: int) -> bool:
        """Wait for the record, which another process may be about to write; return whether it exists."""
        deadline = time.monotonic() + BETWEEN_MARK_AND_RECORD_S
        while not any(known.attempt == attempt and not known.open for known in self.attempts()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim of one attempt to own the run, which it checks before it writes.

    Attributes:
        ledger: of the run.
        attempt: its number.
    """

    ledger: Ledger
    attempt: int

    @property
    def is_cancelled(self) -> bool:
        """Whether the user has cancelled the attempt."""
        return self.ledger.directory.is_cancelled(self.attempt)

    def require_ownership(self) -> None:
        """Raise if the attempt is superseded.

        Raises:
            SupersededError: a later attempt owns the run.
        """
        self.ledger.require_ownership(self.attempt)


def _reason(record: dict[str, Any]) -> tuple[Reason, str]:
    """Reason and detail of an end; a reason unknown to this version of hpctrain counts as interrupted."""
    reason, detail = record.get("reason"), record.get("detail") or ""
    try:
        return Reason(str(reason)), detail
    except ValueError:
        return Reason.INTERRUPTED, "; ".join(filter(None, [f"reason {reason!r}, unknown to this hpctrain", detail]))

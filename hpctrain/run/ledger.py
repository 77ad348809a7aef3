"""The ledger of a run: which attempt owns it, and how each attempt ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from hpctrain.errors import RunDirectoryUnavailableError, SupersededError
from hpctrain.files import append_json_line, fsync_directory, read_json_lines
from hpctrain.run.directory import RunDirectory
from hpctrain.run.disk_reserve import release, reserve, write_with_reserve
from hpctrain.run.file_system import explain
from hpctrain.run.reason import Reason
from hpctrain.run.record_fields import COUNT, FLAG, RANKS, TEXT, TEXTS, TIME, field_types, require_fields
from hpctrain.run.secret import discard_secret, write_secret
from hpctrain.run.times import PhaseTimes, TimesRecord, read_times

BETWEEN_MARK_AND_RECORD_S = 5.0
"""Seconds that a busy machine may take between an end's marker and its record; the first marker's record counts."""


@dataclass(frozen=True, kw_only=True)
class StartFacts:
    """What a start records besides the job, the nodes and the step; None if it isn't recorded."""

    restart_count: Annotated[int | None, COUNT] = None
    """How often SLURM had requeued the job."""
    total_steps: Annotated[int | None, COUNT] = None
    """The last step of the run."""
    keep_best: Annotated[int | None, COUNT] = None
    """How many checkpoints with the best evaluations are kept."""
    launched: Annotated[float | None, TIME] = None
    """When rank zero's process started, in epoch seconds."""
    code: Annotated[str | None, TEXT] = None
    """Digest of the copy of the code from which the ranks import."""
    torch: Annotated[str | None, TEXT] = None
    """Version of torch that rank zero has installed; None for a program."""
    resumed_world_size: Annotated[int | None, RANKS] = None
    """Number of ranks that wrote the checkpoint from which it starts, if that was another number."""
    gpu: Annotated[str | None, TEXT] = None
    """Name of rank zero's GPU."""


@dataclass(frozen=True, kw_only=True)
class EndFacts:
    """What an end records besides the reason, the step and the times; None, or empty, if it isn't recorded."""

    saved_step: Annotated[int | None, COUNT] = None
    """Step of the newest complete checkpoint that was on disk."""
    next: Annotated[str | None, TEXT] = None
    """What was to follow: `restart`, `requeue` or `resubmit`."""
    requeued_by: Annotated[str | None, TEXT] = None
    """`hpctrain`, or `slurm` if SLURM requeued the job by itself."""
    suspects: Annotated[tuple[str, ...], TEXTS] = ()
    """Nodes that the failure points to."""
    exclude: Annotated[tuple[str, ...], TEXTS] = ()
    """Nodes without which the run continues."""
    after: Annotated[str | None, TEXT] = None
    """Of an attempt without ranks: the run before this one that has stopped."""
    incomplete_logs: Annotated[str | None, TEXT] = None
    """Which logs lack lines, and how many."""
    error_after_signal: Annotated[bool, FLAG] = False
    """A rank raised an error after SLURM's signal."""
    closed_late: Annotated[bool, FLAG] = False
    """The next attempt recorded the end: its time isn't when the attempt died."""


@dataclass(frozen=True, kw_only=True)
class Attempt(StartFacts, EndFacts, TimesRecord):
    """One attempt as recorded in the ledger; times are epoch seconds, None if not recorded."""

    attempt: int
    job_id: Annotated[str | None, TEXT] = None
    nodes: Annotated[tuple[str, ...], TEXTS] = ()
    world_size: Annotated[int | None, RANKS] = None
    start_step: int | None = None
    start_time: float | None = None
    reason: Reason | None = None
    end_step: int | None = None
    end_time: float | None = None
    detail: Annotated[str, TEXT] = ""

    @property
    def open(self) -> bool:
        """Whether no end was recorded: the attempt is running, or was killed."""
        return self.reason is None

    @property
    def continues(self) -> bool:
        """Whether another attempt was to follow it automatically."""
        return self.next is not None

    @property
    def may_continue(self) -> bool:
        """Whether another attempt was to follow it automatically, or its end isn't recorded yet."""
        return self.open or self.continues

    @property
    def restarts_ranks(self) -> bool:
        """Whether new ranks were to follow it in the same allocation."""
        return self.next == "restart"

    @property
    def had_ranks(self) -> bool:
        """Whether ranks were launched: not if it ended because of a run before this one."""
        return self.after is None

    @property
    def actual_start_step(self) -> int | None:
        """The step from which it resumed: the recorded start, unless a program's first report shows another one."""
        return self.start_step if self.resumed_step is None else self.resumed_step

    @property
    def reached_step(self) -> int | None:
        """The last step that it is known to have completed; None if none is known."""
        return max((step for step in (self.end_step, self.last_step) if step is not None), default=None)

    @property
    def died_at(self) -> float | None:
        """When it ended; None if that isn't recorded: the next attempt closes one that left no end."""
        return None if self.open or self.closed_late else self.end_time

    def with_times(self, directory: RunDirectory) -> Attempt:
        """The attempt with the times in its claim; the ledger gets them with the end."""
        return replace(self, **_recorded(TimesRecord.read(directory.claim(self.attempt)))) if self.open else self


_FIELD_TYPES = {"step": COUNT, "time": TIME, "reason": TEXT, **field_types(Attempt)}
_EVENTS = ("start", "end")
_FACTS = [field.name for facts in (StartFacts, EndFacts, TimesRecord) for field in fields(facts)]


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
            known = found.setdefault(number, {})
            event = str(record.get("event"))
            if event not in _EVENTS or f"{event}_time" in known:
                continue
            facts = {name: value for name in _FACTS if (value := record.get(name)) is not None}
            facts |= {name: tuple(value) for name, value in facts.items() if isinstance(value, list)}
            known |= {f"{event}_{name}": record.get(name) for name in ("step", "time")}
            if event == "start":
                known |= {"job_id": record.get("job_id"), "world_size": record.get("world_size")}
                known["nodes"] = tuple(record.get("nodes") or ())
                known |= facts | known  # an end that was recorded first knows more
            else:
                known["reason"], known["detail"] = _reason(record)
                known |= facts
        return [Attempt(attempt=number, **known) for number, known in sorted(found.items())]

    def attempt(self, number: int) -> Attempt:
        """The records of one attempt so far."""
        return next((entry for entry in self.attempts() if entry.attempt == number), Attempt(attempt=number))

    def last_claim(self) -> int:
        """The number of the newest claim; 0 before the first attempt."""
        return max(self.directory.claimed_attempts(), default=0)

    def unrecorded_ends(self) -> int:
        """How many of the newest attempts in a row were killed, or crashed, before they recorded their end."""
        recorded = (entry.attempt for entry in self.attempts() if not (entry.open or entry.closed_late))
        return self.last_claim() - max(recorded, default=0)

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
        self,
        attempt: int,
        facts: StartFacts | None = None,
        times: PhaseTimes | None = None,
        *,
        job_id: str | None,
        nodes: Sequence[str],
        world_size: int,
        step: int,
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
                **_recorded(facts),
                **_recorded(times),
            },
            durable=True,
        )

    def end(self, attempt: int, facts: EndFacts | None = None, *, reason: Reason, step: int, detail: str = "") -> None:
        """Record why an attempt ended, with its recorded times; the first record counts.

        Raises:
            OSError: the record can't be written, even with the reserved disk space.
        """
        claim = self.directory.claim(attempt)
        record = {"event": "end", "attempt": attempt, "reason": reason.value, "step": step, "time": self.clock()}
        if detail:
            record["detail"] = detail
        write_with_reserve(claim, lambda: self._end(attempt, {**record, **read_times(claim), **_recorded(facts)}))
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


def _recorded(facts: StartFacts | EndFacts | PhaseTimes | None) -> dict[str, Any]:
    """The fields that have something to record, and `code`, which is null without a copy."""
    values = {} if facts is None else {field.name: getattr(facts, field.name) for field in fields(facts)}
    # a step of 0 is recorded, and equals False
    empty = {name for name, value in values.items() if value is None or value is False or value == ()}
    return {name: value for name, value in values.items() if name == "code" or name not in empty}


def _reason(record: dict[str, Any]) -> tuple[Reason, str]:
    """Reason and detail of an end; a reason unknown to this version of hpctrain counts as interrupted."""
    reason, detail = record.get("reason"), record.get("detail") or ""
    try:
        return Reason(str(reason)), detail
    except ValueError:
        return Reason.INTERRUPTED, "; ".join(filter(None, [f"reason {reason!r}, unknown to this hpctrain", detail]))

"""The ledger of a run: which attempt owns it, and how each attempt ended.

Why it is like this: docs/adr/0001-run-directory-and-claims.md.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from hpctrain.errors import RunDirectoryUnavailableError, SupersededError
from hpctrain.files import append_json_line, fsync_directory, read_json_lines
from hpctrain.run.directory import RunDirectory
from hpctrain.run.file_system import explain, release, reserve, write_with_reserve
from hpctrain.run.reason import Reason
from hpctrain.run.record_fields import COUNT, FLAG, RANKS, TEXT, TEXTS, TIME, converted, field_types, require_fields
from hpctrain.run.secret import discard_secret, write_secret
from hpctrain.run.times import PhaseTimes, TimesRecord, read_times

BETWEEN_MARK_AND_RECORD_S = 5.0
"""Seconds to wait for the record of an end after its marker was made: a busy machine writes it late."""


@dataclass(frozen=True, kw_only=True)
class StartFacts:
    """The optional fields of a start record; None if a field isn't recorded."""

    restart_count: Annotated[int | None, COUNT] = None
    """Number of times that SLURM had requeued the job."""
    total_steps: Annotated[int | None, COUNT] = None
    """The last step of the run."""
    keep_best: Annotated[int | None, COUNT] = None
    """Number of checkpoints with the best evaluations to keep."""
    launched: Annotated[float | None, TIME] = None
    """Start of rank zero's process, in epoch seconds."""
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
    """The optional fields of an end record; None, empty or False if a field isn't recorded."""

    saved_step: Annotated[int | None, COUNT] = None
    """Step of the newest complete checkpoint that was on disk."""
    next: Annotated[str | None, TEXT] = None
    """The action that was to follow: `restart`, `requeue` or `resubmit`; None if the run was to end."""
    requeued_by: Annotated[str | None, TEXT] = None
    """`hpctrain`, or `slurm` if SLURM requeued the job by itself."""
    suspects: Annotated[tuple[str, ...], TEXTS] = ()
    """Nodes that may have caused the failure."""
    exclude: Annotated[tuple[str, ...], TEXTS] = ()
    """Nodes that the next attempts must not use."""
    after: Annotated[str | None, TEXT] = None
    """Path of the run that this run waited for and that stopped; such an attempt has no ranks."""
    incomplete_logs: Annotated[str | None, TEXT] = None
    """The logs that lack lines, and the numbers of these lines, in words."""
    error_after_signal: Annotated[bool, FLAG] = False
    """A rank raised an error after SLURM's signal."""
    closed_late: Annotated[bool, FLAG] = False
    """The next attempt recorded the end, so its time isn't the time of death."""


@dataclass(frozen=True, kw_only=True)
class Attempt(StartFacts, EndFacts, TimesRecord):
    """One attempt as recorded in the ledger; times are epoch seconds, None if not recorded.

    A new fact is a field of `StartFacts` if it is known at the start, of `TimesRecord` if rank zero measures it while
    the attempt runs, and of `EndFacts` if the process that ends the attempt knows it.
    """

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
        """Whether ranks were launched; they aren't if the run before this one stopped (`after`)."""
        return self.after is None

    @property
    def actual_start_step(self) -> int | None:
        """The step from which it started: the recorded one, or for a program the one that its first report shows."""
        return self.start_step if self.resumed_step is None else self.resumed_step

    @property
    def reached_step(self) -> int | None:
        """The last step that it is known to have completed; None without any."""
        return max((step for step in (self.end_step, self.last_step) if step is not None), default=None)

    @property
    def died_at(self) -> float | None:
        """The time at which it ended; None if it left no end record, also if the next attempt added one."""
        return None if self.open or self.closed_late else self.end_time

    def with_times(self, directory: RunDirectory) -> Attempt:
        """Return the attempt with the times in its claim, if it is open: the ledger has them only with the end."""
        return replace(self, **_recorded(TimesRecord.read(directory.attempt(self.attempt)))) if self.open else self


_EVENT_TYPES = {"step": COUNT, "time": TIME, "reason": TEXT}
_EVENTS = ("start", "end")


@dataclass(frozen=True, slots=True)
class Ledger:
    """Attempts of one run, in ``attempts.jsonl`` and the claims next to it.

    An attempt owns the run from the moment at which it makes its claim, a directory named by its number, until a later
    claim exists: `mkdir` is atomic, on a shared file system too. Call `require_ownership` before anything is published.

    Two attempts may be alive at once: SLURM requeues the job of a batch host that is cut off from the network, whose
    ranks live on for more than a minute. A claim is no lock, which a dead node would leave behind or NFS lose, and no
    lease, which needs clocks that agree. SLURM's ids can't decide: a resume is another job, and the old attempt may not
    reach SLURM.
    """

    directory: RunDirectory
    clock: Callable[[], float] = time.time

    def attempts(self) -> list[Attempt]:
        """All attempts, oldest first; if an attempt has several ends, the first counts.

        Raises:
            RunDirectoryError: a field of a record has the wrong type.
        """
        by_number: dict[int, dict[str, Any]] = {}
        path, types = self.directory.attempts, _EVENT_TYPES | field_types(Attempt)
        for record in read_json_lines(path):
            number = record.get("attempt")
            if not isinstance(number, int) or not COUNT.accepts(number):
                continue
            require_fields(path, record, types)
            values = by_number.setdefault(number, {})
            event = str(record.get("event"))
            if event not in _EVENTS or f"{event}_time" in values:
                continue
            facts = converted(record, field_types(Attempt))
            values |= {f"{event}_{name}": record.get(name) for name in ("step", "time")}
            if event == "start":  # the end may come first in the file, and its facts are newer
                values |= facts | values
            else:
                values |= facts
                values["reason"], values["detail"] = _reason(record)
        return [Attempt(attempt=number, **values) for number, values in sorted(by_number.items())]

    def attempt(self, number: int) -> Attempt:
        """The records of one attempt so far."""
        return next((entry for entry in self.attempts() if entry.attempt == number), Attempt(attempt=number))

    def last_claim(self) -> int:
        """The number of the newest claim; 0 before the first attempt."""
        return max(self.directory.claimed_attempts(), default=0)

    def num_unrecorded_ends(self) -> int:
        """Return the number of newest attempts in a row that were killed, or crashed, without an end record."""
        recorded = (entry.attempt for entry in self.attempts() if not (entry.open or entry.closed_late))
        return self.last_claim() - max(recorded, default=0)

    def claim(self, *, secret: bool = False) -> int:
        """Claim the run for a new attempt.

        Args:
            secret: also write a secret into the claim, by which the attempt's ranks recognise each other.

        Returns:
            The attempt's number, counted from 1.

        Raises:
            RunDirectoryUnavailableError: the run directory is gone or can't be written.
        """
        try:
            return self._make_claim(secret=secret)
        except OSError as error:
            raise RunDirectoryUnavailableError(
                f"{self.directory.path}: a new attempt can't be claimed ({explain(error, self.directory.path)}); "
                "check that the run directory exists and is writable"
            ) from error

    def _make_claim(self, *, secret: bool) -> int:
        number = self.last_claim()
        while True:
            number += 1
            claim = self.directory.attempt(number)
            try:
                claim.mkdir()
            except FileExistsError:
                continue
            try:
                if number > 1:
                    self.directory.attempt(number - 1).mkdir(exist_ok=True)  # it may have been taken back meanwhile
                fsync_directory(self.directory.claims)
                if secret:
                    write_secret(claim)
                # without a reserve, an attempt on a full disk couldn't record its end
                reserve(claim)
            except OSError:
                self._remove_claim(number)
                raise
            return number

    def _remove_claim(self, number: int) -> None:
        """Remove a claim, unless there is a later one; otherwise it would count as an attempt that was killed."""
        claim = self.directory.attempt(number)
        discard_secret(claim)
        with contextlib.suppress(OSError):
            claim.rmdir()
            # not checked before rmdir: a later claim that is made in between would leave a gap
            if self.directory.attempt(number + 1).exists():
                claim.mkdir()

    def owns(self, attempt: int) -> bool:
        """Whether no later attempt has claimed the run."""
        # claims have no gaps, and this runs before each publish: one stat instead of a listing
        return not self.directory.attempt(attempt + 1).exists()

    def require_ownership(self, attempt: int) -> None:
        """Raise if the attempt is superseded, before it writes.

        A claim that is made between this call and the write does no harm: what is published then is a complete
        checkpoint of the same run.

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
        record = {"event": "start", "attempt": attempt, "job_id": job_id, "nodes": list(nodes)}
        record |= {"world_size": world_size, "step": step, "time": self.clock()}
        append_json_line(self.directory.attempts, {**record, **_recorded(facts), **_recorded(times)}, durable=True)

    def end(self, attempt: int, facts: EndFacts | None = None, *, reason: Reason, step: int, detail: str = "") -> None:
        """Record why an attempt ended, with its recorded times; the first record counts.

        Raises:
            OSError: the record can't be written, even with the reserved disk space.
        """
        claim = self.directory.attempt(attempt)
        record = {"event": "end", "attempt": attempt, "reason": reason.value, "step": step, "time": self.clock()}
        if detail:
            record["detail"] = detail
        write_with_reserve(claim, lambda: self._end(attempt, {**record, **read_times(claim), **_recorded(facts)}))
        release(claim)

    def _end(self, attempt: int, record: dict[str, Any]) -> None:
        # Ranks that were started by hand end at the same moment on several nodes. Over NFS, appends from two nodes may
        # overwrite each other, while only one of them can make this file.
        try:
            (self.directory.attempt(attempt) / "ended").open("x").close()
        except FileExistsError:
            if self._wait_for_end_record(attempt):
                return
            # the process that made the marker was killed, or the disk was full, before it wrote the record
        append_json_line(self.directory.attempts, record, durable=True)

    def _wait_for_end_record(self, attempt: int) -> bool:
        """Wait for the record, which another process may be about to write; return whether it exists."""
        deadline = time.monotonic() + BETWEEN_MARK_AND_RECORD_S
        while not any(entry.attempt == attempt and not entry.open for entry in self.attempts()):
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
    """Return the fields to record: those with a value, and `code`, which is null without a copy of the code."""
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

"""The sender: it claims a run, hands the rows to a service in order, and keeps the cursor."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hpctrain.errors import HpctrainError
from hpctrain.files import TEMPORARY_PREFIX, open_folder_below, read_json_or_empty, temporary_name, write_json
from hpctrain.run.directory import RunDirectory
from hpctrain.run.launcher import FILE_NAME, Owner
from hpctrain.run.record_fields import COUNT, FLAG, TEXT, TIME, describe_wrong_field
from hpctrain.sync.sent_run import Rows, describe, describe_state, identify
from hpctrain.sync.service import NOTHING, Service, problem_text

TOUCH_EVERY_S = 10.0
STALE_S = 90.0
"""Seconds without a touch after which a claim of another machine is void: nine touches, and an NFS client's cache."""
RELEASED = "released"
BATCH_ROWS = 200
"""Rows between two writes of the cursor."""
_REMOVED = (errno.ENOENT, errno.ESTALE)
"""Errors that show that another process has removed a file; the second one on NFS."""
_UNRECORDED_RELEASES: set[tuple[Path, int]] = set()
"""Claims that this process gave back, while the file system couldn't record it."""
UNKNOWN = 2**62
"""Stands for any step: rows up to it may be there."""


class BusyError(HpctrainError):
    """Another process sends this run to this service."""


class SenderClaim:
    """The right to send a run to a service, from `acquire` to `release`; one process has it, on whichever machine.

    A claim is a folder with its owner's name, which is renamed to its number: that fails if the number is taken, on a
    shared file system too, since a folder that isn't empty is never replaced (POSIX, rename). The number exceeds all
    earlier ones: a process that was taken for dead finds a higher one, and stops. Not a lock, which some cluster file
    systems don't have across nodes.

    Args:
        directory: of the run.
        service: its name.
    """

    def __init__(self, directory: RunDirectory, service: str) -> None:
        self._directory = directory
        self._name = f"{directory.sync.name}/{service}_claims"
        self._number = 0
        self._descriptor = -1
        self._ended = threading.Event()

    def acquire(self) -> None:
        """Claim the run.

        Raises:
            BusyError: another process sends it.
            OSError: the file system's error, or a folder is a link.
        """
        # earlier claims are removed: a link in the place of a folder must not lead to other folders of this user
        with open_folder_below(self._directory.path, self._name, create=True) as (folder, _):
            self._descriptor = os.dup(folder)
        path = self._make_claim()
        threading.Thread(target=self._touch, args=(path / FILE_NAME,), name="claim", daemon=True).start()

    def require(self) -> None:
        """Check that no later claim exists.

        Raises:
            BusyError: one does.
        """
        if self._newest() != self._number:
            raise BusyError("another process took over")

    def release(self) -> None:
        """Give the claim back; its folder stays, so that numbers only increase."""
        self._ended.set()
        if self._number:
            try:
                (self._path(self._number) / RELEASED).touch()
            except OSError:
                _UNRECORDED_RELEASES.add((self._directory.path / self._name, self._number))
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def _folder(self) -> Path:
        return Path(f"/proc/self/fd/{self._descriptor}")

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}"

    def _newest(self) -> int:
        return max((int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()), default=0)

    def _make_claim(self) -> Path:
        newest = self._newest()
        if newest:
            self._require_void(self._path(newest))
        path = self._path(newest + 1)
        temporary = temporary_name(path)
        temporary.mkdir()
        try:
            Owner.write(temporary)
            temporary.rename(path)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            # the process that made this claim, or a later one, removes the unfinished ones of others
            if error.errno not in _REMOVED and not os.path.exists(path):  # noqa: PTH110 - never raises
                raise
            # NFS repeats a request whose answer was lost, and then reports that there is nothing to rename
            owner = Owner.read(path)
            if owner is None or (owner.host, owner.pid) != (socket.gethostname(), os.getpid()):
                raise BusyError("another process has just begun to send it") from None
        self._number = newest + 1
        self.require()  # others may have come and gone since the folder was listed
        for earlier in self._folder.iterdir():
            if earlier.name < path.name or earlier.name.startswith(TEMPORARY_PREFIX):
                shutil.rmtree(earlier, ignore_errors=True)
        return path

    def _require_void(self, claim: Path) -> None:
        if (claim / RELEASED).exists():
            return
        owner = Owner.read(claim)
        if owner is not None and owner.is_here:
            place = (self._directory.path / self._name, int(claim.name))
            is_released = owner.pid == os.getpid() and place in _UNRECORDED_RELEASES
            if owner.alive and not is_released:
                raise BusyError(f"process {owner.pid} on this machine is already sending it")
            return
        age_s = self._age_s(claim)
        if age_s < STALE_S:
            who = "another process" if owner is None else f"process {owner.pid} on {owner.host}"
            raise BusyError(f"{who} is already sending it, as of {max(0.0, age_s):.0f} s ago")

    def _age_s(self, claim: Path) -> float:
        # both times are the file server's: clocks of machines may differ by more than the bound
        probe = temporary_name(self._folder / "now")
        try:
            probe.touch()
            now = probe.stat().st_mtime
            probe.unlink(missing_ok=True)
            return now - (claim / FILE_NAME).stat().st_mtime
        except OSError as error:
            if error.errno not in _REMOVED:
                raise
            return STALE_S  # a later claim has removed the folder or the probe, and the new one can't be made

    def _touch(self, path: Path) -> None:
        while not self._ended.wait(TOUCH_EVERY_S):
            with contextlib.suppress(OSError):
                os.utime(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The progress of a run's transfer to a service, as far as it is known.

    It saves work and decides nothing: if the file is lost or can't be parsed, a sender asks the service.

    Attributes:
        run_id: the service's id of the run; empty before it was made.
        address: of the run's page; empty if unknown.
        digest: of the run to which the file belongs: a copy of its directory has another one.
        destination: where the run was sent, as `Service.destination` names it.
        confirmed_step: the service has all rows up to this step; None for none.
        handed_over_step: rows up to this step may be there, since a sender handed them over; None for none.
        state: of the run, as it was last reported.
        complete: whether the service has all rows of a run that has ended.
        problem: why the last sending failed, in one line; empty if it didn't.
        time: when it was written, in epoch seconds.
    """

    run_id: str = ""
    address: str = ""
    digest: str = ""
    destination: str = ""
    confirmed_step: int | None = None
    handed_over_step: int | None = None
    state: str = ""
    complete: bool = False
    problem: str = ""
    time: float = 0.0

    @property
    def after(self) -> int:
        """The last step whose row need not be sent."""
        return NOTHING if self.confirmed_step is None else self.confirmed_step

    @classmethod
    def read(cls, directory: RunDirectory, service: str) -> Cursor:
        """Read a service's cursor; with one that can't be parsed, everything is in doubt."""
        path = cursor_path(directory, service)
        record = {name: value for name, value in read_json_or_empty(path).items() if value is not None}
        if not record or describe_wrong_field(record, _FIELD_TYPES):
            return cls(handed_over_step=UNKNOWN) if path.exists() else cls()
        return cls(**{name: value for name, value in record.items() if name in _FIELD_TYPES})

    def write(self, directory: RunDirectory, service: str) -> None:
        """Replace the service's cursor, durably.

        Raises:
            OSError: the file system's error.
        """
        write_json(cursor_path(directory, service), asdict(self))


_TYPES = {"str": TEXT, "int | None": COUNT, "bool": FLAG, "float": TIME}
_FIELD_TYPES = {field.name: _TYPES[str(field.type)] for field in fields(Cursor)}


def cursor_path(directory: RunDirectory, service: str) -> Path:
    """The file of a service's cursor."""
    return directory.sync / f"{service}.json"


class Sender:
    """Sends one run to one service; the caller holds the claim.

    `open`, `send` and `close` raise a ServiceError if the service can't be reached, or refuses; `send` and `close` a
    BusyError if another process took over; any may raise an OSError of the file system.

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
        """The server and the project or experiment to which the run is sent.

        Raises:
            ServiceSetupError: no server is known.
        """
        return self._service.destination(self._run)

    def is_up_to_date(self, limit: int | None, state: str) -> bool:
        """Return whether an earlier sender has sent all rows before a step, and reported the run's state.

        Args:
            limit: the step; None for all.
            state: as `status` names it.
        """
        self._rows.read()
        cursor = self._cursor
        is_reported = cursor.destination == self.destination and cursor.state == state
        return is_reported and cursor.handed_over_step is None and not self._rows.before(limit)

    def open(self) -> str:
        """Find or make the run at the service; return the address of its page, or an empty text.

        A cursor of another destination is ignored. If the service has fewer rows than the cursor records, the service
        is right: the run may have been deleted there.
        """
        destination = self.destination
        if self._cursor.destination not in ("", destination):
            self._use(Cursor())
        opened = self._service.open(self._run, self._cursor.run_id)
        if opened.last_step is not None and opened.last_step < self._cursor.after:
            confirmed_step = None if opened.last_step == NOTHING else opened.last_step
            self._use(replace(self._cursor, confirmed_step=confirmed_step))
        self._update(run_id=opened.run_id, address=opened.address, digest=self._run.digest, destination=destination)
        return opened.address

    def send(self, limit: int | None) -> None:
        """Send the rows before a step, or all of them if it is None."""
        self._rows.read()
        rows = self._rows.before(limit)
        for first in range(0, len(rows), BATCH_ROWS):
            batch = rows[first : first + BATCH_ROWS]
            last = batch[-1].step
            self._claim.require()
            self._update(handed_over_step=last, complete=False)
            self._service.send(batch, in_doubt=batch[0].step <= self._doubtful_step)
            self._handed_over = last
            self._rows.mark_sent(batch)
            self.num_sent += len(batch)
            if not self._service.confirms_at_close:
                self._confirm(last)

    def close(self, state: str) -> None:
        """Report the run's state, as `status` names it, and wait until the service has everything."""
        self._claim.require()
        reported = describe_state(self._directory, state)
        self._service.close(reported)
        self._rows.read()
        is_complete = reported.final and self.next_step is None
        self._confirm(self._handed_over, state=state, problem="", complete=is_complete)

    @contextlib.contextmanager
    def leaving_on_error(self) -> Iterator[None]:
        """Context manager: an error makes the sender leave the service without waiting, and record why."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._service.abandon()
                if not isinstance(error, BusyError):  # another process owns the cursor
                    self._update(problem=problem_text(error))
            raise

    @property
    def sent_step(self) -> int | None:
        """The step up to which rows were handed over; None before the first."""
        step = max(self._handed_over, self._cursor.after)
        return None if step == NOTHING else step

    @property
    def next_step(self) -> int | None:
        """The step of the first row that waits; None if none does."""
        return next((row.step for row in self._rows.before(None)), None)

    def _use(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._doubtful_step = NOTHING if cursor.handed_over_step is None else cursor.handed_over_step
        self._rows.continue_after(cursor.after)
        self._handed_over = cursor.after

    def _confirm(self, step: int, **changes: Any) -> None:
        confirmed_step = self._cursor.confirmed_step if step == NOTHING else step
        self._update(confirmed_step=confirmed_step, handed_over_step=None, **changes)

    def _update(self, **changes: Any) -> None:
        """Replace fields of the cursor, and write it."""
        self._cursor = replace(self._cursor, time=time.time(), **changes)
        self._cursor.write(self._directory, self._name)

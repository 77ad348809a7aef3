"""The claim of a sender: one process at a time sends a run to a service, on whichever machine."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import threading
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.files import TEMPORARY_PREFIX, open_folder_below, temporary_name
from hpctrain.run.directory import RunDirectory
from hpctrain.run.launcher import FILE_NAME, Owner

TOUCH_EVERY_S = 10.0
STALE_S = 90.0
"""Seconds without a touch after which a claim of another machine is void: nine touches, and an NFS client's cache."""
RELEASED = "released"
JUST_BEGUN = "another process has just begun to send it"


class BusyError(HpctrainError):
    """Another process sends this run to this service."""


class SenderClaim:
    """The right to send a run to a service, from `acquire` to `release`.

    A claim is a folder with its owner's name, which is renamed to its number: that fails if the number is taken, on a
    shared file system too, since a folder that isn't empty is never replaced (POSIX, rename). The number exceeds all
    earlier ones: a process that was taken for dead finds a higher one, and stops.

    Args:
        directory: of the run.
        service: its name.
        stale_s: seconds without a touch after which the claim of another machine is void.
    """

    def __init__(self, directory: RunDirectory, service: str, *, stale_s: float = STALE_S) -> None:
        self._directory = directory
        self._service = service
        self._stale_s = stale_s
        self._number = 0
        self._descriptor = -1
        self._ended = threading.Event()

    def acquire(self) -> None:
        """Claim the run.

        Raises:
            BusyError: another process sends it.
            OSError: the file system's error, or a folder is a link.
        """
        name = f"{self._directory.sync.name}/{self._service}_claims"
        # earlier claims are removed: a link in the place of a folder must not lead to other folders of this user
        with open_folder_below(self._directory.path, name, create=True) as (folder, _):
            self._descriptor = os.dup(folder)
        try:
            path = self._make_claim()
        except OSError as error:
            # a process that has just claimed the run removes the unfinished claims of others, here this one
            if error.errno not in (errno.ENOENT, errno.ESTALE) or not self._folder.exists():
                raise
            raise BusyError(JUST_BEGUN) from None
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
            with contextlib.suppress(OSError):
                (self._folder / f"{self._number:06d}" / RELEASED).touch()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def _folder(self) -> Path:
        return Path(f"/proc/self/fd/{self._descriptor}")

    def _make_claim(self) -> Path:
        newest = self._newest()
        if newest:
            self._require_void(self._folder / f"{newest:06d}")
        path = self._folder / f"{newest + 1:06d}"
        made = temporary_name(path)
        made.mkdir()
        Owner.write(made)
        try:
            made.rename(path)
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            # NFS repeats a request whose answer was lost, and then reports that there is nothing to rename
            owner = Owner.read(path)
            if owner is None or (owner.host, owner.pid) != (socket.gethostname(), os.getpid()):
                raise BusyError(JUST_BEGUN) from None
        self._number = newest + 1
        self.require()  # others may have come and gone since the folder was listed
        for earlier in self._folder.iterdir():
            if earlier.name < path.name or earlier.name.startswith(TEMPORARY_PREFIX):
                shutil.rmtree(earlier, ignore_errors=True)
        return path

    def _newest(self) -> int:
        return max((int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()), default=0)

    def _require_void(self, claim: Path) -> None:
        if (claim / RELEASED).exists():
            return
        owner = Owner.read(claim)
        if owner is not None and owner.is_here:
            if owner.alive:
                raise BusyError(f"process {owner.pid} on this machine is already sending it")
            return
        age_s = self._age_s(claim)
        if age_s < self._stale_s:
            who = "another process" if owner is None else f"process {owner.pid} on {owner.host}"
            raise BusyError(f"{who} is already sending it, as of {max(0.0, age_s):.0f} s ago")

    def _age_s(self, claim: Path) -> float:
        # both times are the file server's: clocks of machines may differ by more than the bound
        probe = temporary_name(self._folder / "now")
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink(missing_ok=True)
        try:
            return now - (claim / FILE_NAME).stat().st_mtime
        except FileNotFoundError:
            return self._stale_s  # a later claim has removed the folder, and there will be nothing to rename to

    def _touch(self, path: Path) -> None:
        while not self._ended.wait(TOUCH_EVERY_S):
            with contextlib.suppress(OSError):
                os.utime(path)

"""What `sync` does for one run and one service: send once, follow the run, or send during its training."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpctrain.errors import ExitCode, HpctrainError, RunDirectoryError
from hpctrain.files import describe_os_error
from hpctrain.phrases import counted
from hpctrain.run.checkpoints import saved_step
from hpctrain.run.directory import RunDirectory
from hpctrain.status.report import read_statuses
from hpctrain.status.state import RunState
from hpctrain.sync.description import describe
from hpctrain.sync.rows import Rows
from hpctrain.sync.sender import BusyError, Sender, SenderClaim
from hpctrain.sync.sender_processes import Parent
from hpctrain.sync.service import NOTHING, SERVICES, Service, ServiceError, ServiceSetupError, make_service

LOOK_EVERY_S = 5.0
"""Seconds between two looks for a new checkpoint."""
FOLLOW_EVERY_S = 30.0
"""Seconds between two queries of the run's state by `--follow`, which may reach SLURM's controller."""
FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 300.0
"""Seconds between attempts to reach a service, at first and at most."""
BUSY_PAUSE_S = 1.0
"""Seconds until a sender process tries again to claim the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One run and one service.

    Attributes:
        directory: of the run.
        service: its name.
        offline: write the service's offline files.
        everything: also send what lies after the newest checkpoint of a run that has stopped.
        server: its address, in place of the one that the run names; for MLflow alone.
        make_client: of the service.
    """

    directory: RunDirectory
    service: str
    offline: bool = False
    everything: bool = False
    server: str | None = None
    make_client: Callable[..., Service] = make_service

    @property
    def shown(self) -> str:
        """The run and the service, as they begin a line."""
        return f"{os.path.relpath(self.directory.path)}: {SERVICES[self.service]}"

    @property
    def cursor(self) -> str:
        """The name of its cursor and its claims; W&B's offline files have others than W&B."""
        return f"{self.service}_offline" if self.offline else self.service

    def make(self) -> Service:
        """Make the service's client.

        Raises:
            ServiceSetupError: its package isn't installed.
        """
        return self.make_client(self.service, self.directory, offline=self.offline, server=self.server)

    def require_trusted(self) -> None:
        """Check, before anything is written, that a server is known, and that other users alone couldn't have named it.

        Raises:
            UntrustedServerError: other users could have named the server.
            ServiceSetupError: the service's package isn't installed, or no server is known.
        """
        self.make().destination(describe(self.directory, ""))

    @contextlib.contextmanager
    def claimed(self) -> Iterator[SenderClaim]:
        """Claim the run for this process.

        Raises:
            BusyError: another process sends it.
        """
        claim = SenderClaim(self.directory, self.cursor)
        claim.acquire()
        try:
            yield claim
        finally:
            claim.release()


def send_once(transfer: Transfer, *, quiet: bool = False, rows: Rows | None = None) -> ExitCode:
    """Send what may be sent now, and print what was sent.

    Args:
        transfer: what to send.
        quiet: print only if something was sent.
        rows: those that an earlier call left, so that it doesn't read everything again.

    Raises:
        BusyError: another process sends it.
        ServiceError: the service can't be reached, or refuses.
        ServiceSetupError: its package isn't installed, or no server is known.
        RunDirectoryError: everything is asked for, but the run may continue.
        OSError: the file system's error.
    """
    (status,) = read_statuses([transfer.directory])
    if transfer.everything and status.state.may_change:
        raise RunDirectoryError(f"{transfer.directory.path} is {status.state}: --all is for runs that have stopped")
    limit = None if transfer.everything or status.state is RunState.COMPLETED else saved_step(transfer.directory)
    with transfer.claimed() as claim:
        sender = Sender(transfer.directory, transfer.cursor, transfer.make(), claim, rows)
        if sender.is_up_to_date(limit, status.state.value):
            if not quiet:
                print(f"{transfer.shown}: nothing to send{_upto(sender)}; the run is {status.state}")
            return ExitCode.FINISHED
        try:
            address = sender.open()
            sender.send(limit)
            sender.close(status.state.value)
        except BaseException as error:
            _leave(sender, error)
            raise
    shown = f"{transfer.shown}: {_described(sender)}; the run is {status.state}{f'; {address}' if address else ''}"
    print(shown, flush=True)
    if (step := sender.next_step) is not None and not quiet:
        rest = "--all sends it" if not status.state.may_change else "it follows once a checkpoint is saved"
        print(f"{transfer.shown}: what was logged from step {step} on lies after the newest checkpoint; {rest}")
    return ExitCode.FINISHED


def follow(transfer: Transfer, sleep: Callable[[float], None] = time.sleep) -> ExitCode:
    """Send again and again until the run has stopped; the service may fail for a while.

    Args:
        transfer: what to send.
        sleep: waits for some seconds.

    Raises:
        ServiceSetupError: its package isn't installed, or no server is known.
        RunDirectoryError: everything is asked for, but the run may continue.
    """
    pause_s, stopped = FIRST_PAUSE_S, False
    rows = Rows(transfer.directory, NOTHING)
    while True:
        (status,) = read_statuses([transfer.directory])
        code = ExitCode.FINISHED
        try:
            send_once(transfer, quiet=True, rows=rows)
            pause_s = FIRST_PAUSE_S
        except (BusyError, ServiceError, OSError) as error:
            code = ExitCode.FAILED
            print(f"{transfer.shown}: {_text(error)}; trying again in {pause_s:.0f} s", flush=True)
        waits = status.state.may_change or status.state in (RunState.PREPARED, RunState.UNKNOWN)
        # a run that is about to be requeued appears to be interrupted for a moment
        if code is ExitCode.FINISHED and not waits and (stopped or status.state is not RunState.INTERRUPTED):
            print(f"{transfer.shown}: the run is {status.state}", flush=True)
            return code
        stopped = not waits
        if code is ExitCode.FINISHED:
            sleep(FOLLOW_EVERY_S)
        else:
            sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def send_during_training(transfer: Transfer, parent: Parent) -> ExitCode:
    """Send what lies before each new checkpoint while the parent trains, and the rest if it completes the run.

    Nothing is raised: each problem is a line of the log, and is tried again unless its user has to mend it.

    Args:
        transfer: what to send.
        parent: rank zero.
    """
    pause_s, waits = FIRST_PAUSE_S, False
    while True:
        knew = parent.end
        try:
            with transfer.claimed() as claim:
                _session(transfer, parent, claim)
                return ExitCode.FINISHED
        except BusyError as error:
            # usually that of the attempt before, which is about to end; rank zero bounds the wait at the end
            if parent.end == Parent.LEFT:
                return ExitCode.FAILED
            if not waits:
                print(f"{SERVICES[transfer.service]}: {error}; waiting", flush=True)
            waits = True
            time.sleep(BUSY_PAUSE_S)
        except ServiceSetupError as error:
            print(f"{SERVICES[transfer.service]}: {error}", flush=True)
            return ExitCode.FAILED
        except (HpctrainError, OSError) as error:
            # a run that was completed meanwhile gets one more try, at once
            ends = knew is not None or parent.end == Parent.LEFT
            then = "" if ends else f"; trying again in {pause_s:.0f} s"
            print(f"{SERVICES[transfer.service]}: {_text(error)}{then}", flush=True)
            if ends:
                return ExitCode.FAILED
            parent.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _session(transfer: Transfer, parent: Parent, claim: SenderClaim) -> None:
    """Send until the parent ends."""
    service = SERVICES[transfer.service]
    sender = Sender(transfer.directory, transfer.cursor, transfer.make(), claim)
    try:
        # before the service is asked: its client may hang, and rank zero then kills this process
        print(f"{service}: opening {sender.destination}", flush=True)
        address = sender.open()
        print(f"{service}: {address or 'writing'}", flush=True)
        while True:
            end = parent.end
            sender.send(None if end == Parent.COMPLETED else saved_step(transfer.directory))
            if end is not None:
                break
            parent.wait(LOOK_EVERY_S)
        sender.close("completed" if end == Parent.COMPLETED else "interrupted")
        print(f"{service}: {_described(sender)}", flush=True)
    except BaseException as error:
        _leave(sender, error)
        raise


def _leave(sender: Sender, error: BaseException) -> None:
    with contextlib.suppress(OSError):
        sender.leave(None if isinstance(error, BusyError) else _text(error))


def _described(sender: Sender) -> str:
    return f"{counted(sender.num_sent, 'step')} sent{_upto(sender)}"


def _upto(sender: Sender) -> str:
    step = sender.sent_step
    return "" if step is None else f", up to step {step}"


def _text(error: BaseException) -> str:
    return describe_os_error(error) if isinstance(error, OSError) else str(error) or type(error).__name__

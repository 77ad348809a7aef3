"""The transfer of one run to one service: send once, follow the run, or send during its training."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpctrain.config.logger import SERVICES
from hpctrain.errors import ExitCode, HpctrainError, RunDirectoryError
from hpctrain.phrases import counted
from hpctrain.run.checkpoints import saved_step
from hpctrain.run.directory import RunDirectory
from hpctrain.status.run_status import read_statuses
from hpctrain.status.state import RunState
from hpctrain.sync.sender import BusyError, Sender, SenderClaim
from hpctrain.sync.sender_processes import Parent
from hpctrain.sync.sent_run import Rows, describe
from hpctrain.sync.service import NOTHING, Service, ServiceError, ServiceSetupError, make_service, problem_text

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
    def title(self) -> str:
        """The service, as it begins a line."""
        return SERVICES[self.service].title

    @property
    def shown(self) -> str:
        """The run and the service, as they begin a line."""
        return f"{os.path.relpath(self.directory.path)}: {self.title}"

    def require_trusted(self) -> None:
        """Check, before anything is written, that a server is known, and that other users alone couldn't have named it.

        Raises:
            UntrustedServerError: other users could have named the server.
            ServiceSetupError: the service's package isn't installed, or no server is known.
        """
        self._client().destination(describe(self.directory, ""))

    @contextlib.contextmanager
    def sender(self, rows: Rows | None = None) -> Iterator[Sender]:
        """Claim the run for this process, and yield its sender; the claim ends with the context.

        Args:
            rows: those that an earlier sender left, so that this one doesn't read everything again.

        Raises:
            BusyError: another process sends it.
            ServiceSetupError: the service's package isn't installed.
        """
        # W&B's offline files have another cursor and other claims than W&B
        name = f"{self.service}_offline" if self.offline else self.service
        claim = SenderClaim(self.directory, name)
        try:
            claim.acquire()
            yield Sender(self.directory, name, self._client(), claim, rows)
        finally:
            claim.release()

    def _client(self) -> Service:
        return self.make_client(self.service, self.directory, offline=self.offline, server=self.server)


def send_once(transfer: Transfer, *, quiet: bool = False, rows: Rows | None = None) -> ExitCode:
    """Send what may be sent now, and print what was sent.

    Args:
        transfer: what to send.
        quiet: print only if something was sent.
        rows: as in `Transfer.sender`.

    Raises:
        BusyError: another process sends it.
        ServiceError: the service can't be reached, or refuses.
        ServiceSetupError: its package isn't installed, no server is known, or MLflow refuses a folder.
        RunDirectoryError: everything is asked for, but the run may continue.
        OSError: the file system's error.
    """
    (status,) = read_statuses([transfer.directory])
    if transfer.everything and status.state.may_change:
        raise RunDirectoryError(f"{transfer.directory.path} is {status.state}: --all is for runs that have stopped")
    # no resume repeats what lies before the newest checkpoint, unless that is damaged: what was sent then stays as sent
    limit = None if transfer.everything or status.state is RunState.COMPLETED else saved_step(transfer.directory)
    with transfer.sender(rows) as sender:
        if sender.is_up_to_date(limit, status.state.value):
            if not quiet:
                print(f"{transfer.shown}: nothing to send{_last_step_text(sender)}; the run is {status.state}")
            return ExitCode.FINISHED
        with sender.leaving_on_error():
            address = sender.open()
            sender.send(limit)
            sender.close(status.state.value)
    where = f"; {address}" if address else ""
    print(f"{transfer.shown}: {_summary(sender)}; the run is {status.state}{where}", flush=True)

    if (step := sender.next_step) is not None and not quiet:
        hint = "--all sends it" if not status.state.may_change else "it follows once a checkpoint is saved"
        print(f"{transfer.shown}: what was logged from step {step} on lies after the newest checkpoint; {hint}")
    return ExitCode.FINISHED


def follow(transfer: Transfer, sleep: Callable[[float], None] = time.sleep) -> ExitCode:
    """Send again and again until the run has stopped; the service may fail for a while.

    Args:
        transfer: what to send.
        sleep: waits for some seconds.

    Raises:
        ServiceSetupError: its package isn't installed, no server is known, or MLflow refuses a folder.
        RunDirectoryError: everything is asked for, but the run may continue.
    """
    pauses = _pauses()
    stopped = False
    rows = Rows(transfer.directory, NOTHING)
    while True:
        (status,) = read_statuses([transfer.directory])
        waits = status.state.may_change or status.state in (RunState.PREPARED, RunState.UNKNOWN)
        try:
            send_once(transfer, quiet=True, rows=rows)
        except (BusyError, ServiceError, OSError) as error:
            pause_s = next(pauses)
            print(f"{transfer.shown}: {problem_text(error)}; trying again in {pause_s:.0f} s", flush=True)
        else:
            # a run that is about to be requeued appears to be interrupted for a moment
            if not waits and (stopped or status.state is not RunState.INTERRUPTED):
                print(f"{transfer.shown}: the run is {status.state}", flush=True)
                return ExitCode.FINISHED
            pauses = _pauses()
            pause_s = FOLLOW_EVERY_S
        stopped = not waits
        sleep(pause_s)


def send_during_training(transfer: Transfer, parent: Parent) -> ExitCode:
    """Send what lies before each new checkpoint while the parent trains, and the rest if it completes the run.

    Nothing is raised: each problem is a line of the log, and is tried again unless its user has to mend it.

    Args:
        transfer: what to send.
        parent: rank zero.
    """
    pauses = _pauses()
    waits = False
    while True:
        ended_before = parent.end is not None
        try:
            with transfer.sender() as sender, sender.leaving_on_error():
                _send_until_end(transfer, parent, sender)
                return ExitCode.FINISHED
        except BusyError as error:
            # usually that of the attempt before, which is about to end; rank zero bounds the wait at the end
            if parent.end == Parent.LEFT:
                return ExitCode.FAILED
            if not waits:
                print(f"{transfer.title}: {error}; waiting", flush=True)
            waits = True
            time.sleep(BUSY_PAUSE_S)
        except ServiceSetupError as error:
            print(f"{transfer.title}: {error}", flush=True)
            return ExitCode.FAILED
        except (HpctrainError, OSError) as error:
            # a run that was completed meanwhile gets one more try, at once
            ends = ended_before or parent.end == Parent.LEFT
            pause_s = next(pauses)
            then = "" if ends else f"; trying again in {pause_s:.0f} s"
            print(f"{transfer.title}: {problem_text(error)}{then}", flush=True)
            if ends:
                return ExitCode.FAILED
            parent.wait(pause_s)


def _send_until_end(transfer: Transfer, parent: Parent, sender: Sender) -> None:
    # before the service is asked: its client may hang, and rank zero then kills this process
    print(f"{transfer.title}: opening {sender.destination}", flush=True)
    address = sender.open()
    print(f"{transfer.title}: {address or 'writing'}", flush=True)
    while True:
        end = parent.end
        sender.send(None if end == Parent.COMPLETED else saved_step(transfer.directory))
        if end is not None:
            break
        parent.wait(LOOK_EVERY_S)
    sender.close("completed" if end == Parent.COMPLETED else "interrupted")
    print(f"{transfer.title}: {_summary(sender)}", flush=True)


def _pauses() -> Iterator[float]:
    """Seconds between attempts to reach a service."""
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _summary(sender: Sender) -> str:
    return f"{counted(sender.num_sent, 'step')} sent{_last_step_text(sender)}"


def _last_step_text(sender: Sender) -> str:
    return "" if sender.sent_step is None else f", up to step {sender.sent_step}"

"""The event loop of a rank: signals, the program's reports and its end, requests for stacks, hangs."""

from __future__ import annotations

import logging
import os
import secrets
import select
import signal
import time
from contextlib import suppress
from dataclasses import replace
from types import FrameType, TracebackType

from hpctrain.attempt.hang import PEERS_S, REQUESTS_EVERY_S, HangWatch, Phase
from hpctrain.attempt.termination import Termination
from hpctrain.errors import HpctrainError
from hpctrain.files import write_json
from hpctrain.program.connection_watch import ConnectionWatch
from hpctrain.program.forwarded_stop import ForwardedStop
from hpctrain.program.output import ProgramEnd
from hpctrain.program.processes import ProgramStacks, RunningProgram
from hpctrain.program.rank import ProgramRank
from hpctrain.program.reports import EventPipe, ProgramProgress, Records
from hpctrain.rank.stop_request import STOP_SIGNALS
from hpctrain.run.reason import Reason
from hpctrain.run.stacks import StacksRequests, request_stacks

RECEIVED = (*STOP_SIGNALS, signal.SIGCHLD)
CHECK_EVERY_S = 1.0
"""Seconds between two looks at the program and its reports."""
READ_EVERY_S = 0.05
"""Seconds between two reads of reports: what a fast program reports is read together."""
REPEATED_S = 1.0
"""Seconds in which further signals belong to the same stop: SLURM sends some of them twice."""
STAGED_S = 0.1
"""Seconds between two looks at a stop whose next signal is due when a process has ended."""
OWN_SIGNAL_S = 0.5
"""Seconds in which this process may receive the signal of which the program died."""
OTHER_PROCESSES_S = 2.0
"""Seconds for the other processes of a program to end after the first one."""
STOP_FILE = "stop"

log = logging.getLogger("hpctrain.program")


class Signals:
    """Receives the stop signals and SIGCHLD inside its context, also those that were blocked before it.

    Attributes:
        descriptor: readable when a signal has arrived.
    """

    def __init__(self) -> None:
        self.descriptor, self._write_descriptor = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> Signals:
        """Receive signals from now on."""
        signal.set_wakeup_fd(self._write_descriptor, warn_on_full_buffer=False)
        for number in RECEIVED:
            signal.signal(number, _ignore)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, RECEIVED)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Block them again: this process is about to end, and records why."""
        signal.pthread_sigmask(signal.SIG_BLOCK, RECEIVED)
        signal.set_wakeup_fd(-1)
        os.close(self.descriptor)
        os.close(self._write_descriptor)

    def read(self) -> list[signal.Signals]:
        """The signals since the last call, oldest first."""
        try:
            numbers = os.read(self.descriptor, 4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers]


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the number is in the pipe by now, which takes a handler of Python's."""


class HangError(HpctrainError):
    """The program hangs; its exit record and stacks are written."""


class EventLoop:
    """Runs until the program has ended. Single-threaded; it sleeps unless something happens.

    Args:
        rank: this rank.
        child: its program.
        signals: that this process receives.
        events: that the program reports.
        records: of rank zero; None on the others.
    """

    def __init__(
        self, rank: ProgramRank, child: RunningProgram, signals: Signals, events: EventPipe, records: Records | None
    ) -> None:
        self._rank = rank
        self._child = child
        self._signals = signals
        self._events = events
        self._records = records
        self.progress = ProgramProgress()
        self._hang = HangWatch(rank.config.health, time.monotonic(), CHECK_EVERY_S)
        self._connections = ConnectionWatch(rank, child.process)
        self._requests = StacksRequests(rank.stacks_request)
        run = rank.config.run
        self._stop = ForwardedStop(
            child.process,
            signal.Signals[f"SIG{run.signal}"],
            child.orphans,
            self.progress.reporters,
            suspend=run.on_stop == "requeue",
        )
        self._stop_signal: signal.Signals | None = None
        self._stopped_at = float("-inf")
        self._stops = 0
        self._interrupts = 0
        self._deadline = rank.deadline
        self._staged = False
        self._ended_at: float | None = None
        self._read_at = self._check_at = self._request_at = time.monotonic()

    def run(self) -> ProgramEnd:
        """Attend to the program until its first process has ended, and those that still save.

        Raises:
            HangError: the program hung.
            SupersededError: a later attempt owns the run.
        """
        while (code := self._child.code) is None or self._may_save(code):
            self._run_once()
        self._read_events()
        return ProgramEnd(
            code=code,
            stop_signal=self._stop_signal,
            stopping=self.progress.stopping,
            done=self.progress.done,
            cut_short=self._interrupts > 1,
        )

    def _run_once(self) -> None:
        self._wait()
        for number in self._signals.read():
            if number != signal.SIGCHLD:
                self._receive(number)
        self._child.reap()
        now = time.monotonic()
        if now >= self._read_at:
            self._read_at = now if self._read_events() else now + READ_EVERY_S
        if self._staged:
            self._staged = self._stop.advance(now)
        if now >= self._check_at:
            self._check_at = now + CHECK_EVERY_S
            self._check(now)

    def _may_save(self, code: int) -> bool:
        """Whether processes of the program may still save, although the first one has ended."""
        now = time.monotonic()
        if self._ended_at is None:
            self._ended_at = now
        if not self._stops:
            # where SLURM doesn't track processes by cgroups, it signals all of them, perhaps this one last
            return -code in STOP_SIGNALS and now - self._ended_at < OWN_SIGNAL_S
        return self._stop.send_to_orphans(now - self._ended_at)

    def end_other_processes(self) -> None:
        """Give the other processes of the program a moment to end, and kill them; take their last reports."""
        deadline = time.monotonic() + OTHER_PROCESSES_S
        while self._child.processes() and time.monotonic() < deadline:
            time.sleep(0.02)
            self._child.reap()
        self._child.kill()
        self._read_events()
        if self._records is not None:
            self._records.close(self.progress)

    def _wait(self) -> None:
        now = time.monotonic()
        poll = select.poll()
        poll.register(self._signals.descriptor, select.POLLIN)
        until = self._check_at
        if now >= self._read_at:
            poll.register(self._events.descriptor, select.POLLIN)
        else:
            until = min(until, self._read_at)
        if self._staged or self._child.code is not None:
            until = min(until, now + STAGED_S)
        poll.poll(max(0.0, until - now) * 1000 + 1)

    def _read_events(self) -> bool:
        """Read the program's reports; return whether more of them wait."""
        has_more = self._events.read()
        while self._events.waiting:
            event = self._events.waiting.popleft()
            self.progress.add(event)
            if self._records is not None:
                self._records.add(event, self.progress)
        return has_more

    def _check(self, now: float) -> None:
        # a program that reports no steps may be silent for any time; a save after a stop takes time as well
        if self.progress.started and not self.progress.done:
            phase = Phase.START if self.progress.first_step is None else Phase.TRAINING
            if complaint := self._hang.update(phase, (self.progress.changes, self._stops), now):
                self._record_hang(complaint)
        self._connections.check(now)
        if self._records is not None:
            self._records.record_waiting(self.progress)
        if now < self._request_at:
            return
        self._request_at = now + REQUESTS_EVERY_S
        with suppress(OSError):  # the file system is unavailable
            self._rank.claim.require_ownership()
        token = self._requests.new()
        if token is not None:
            self._write_stacks(self._collect(), "stacks as requested", token)
        if self._rank.claim.is_cancelled:
            self._cancel(now)
        if self._stops:
            self._learn_deadline()

    def _cancel(self, now: float) -> None:
        """Stop the program, which the user has cancelled, and kill it when the time for a save is over."""
        if not self._stops:
            self._receive(signal.SIGTERM, "cancelled by the user")
        elif now - self._stopped_at >= Phase.SAVING.bound_s(self._rank.config.health):
            log.warning("cancelled, and still running after health.save_timeout_s: killing the program")
            self._child.kill()

    def _receive(self, number: signal.Signals, cause: str = "") -> None:
        if self._child.code is not None and self._child.code >= 0 and not self._stops:
            return
        self._interrupts += number == signal.SIGINT
        self._stop_signal = number
        now = time.monotonic()
        if self._interrupts > 1:
            log.info("a second Ctrl-C: killing the program")
            self._child.kill()
            return
        if now - self._stopped_at < REPEATED_S:
            return
        self._stopped_at = now
        self._stops += 1
        self._read_events()  # they say which processes learn of the stop without the signal
        self._write_stop()
        done = self._stop.send()
        self._staged = True
        log.info("%s: %s", cause or f"{number.name} received", done)

    def _write_stop(self) -> None:
        assert self._stop_signal is not None
        record = {"signal": self._stop_signal.name, "time": time.time(), "deadline": self._deadline}
        try:
            write_json(self._rank.session / STOP_FILE, record, durable=False)
        except OSError as error:
            log.warning("can't write the file that asks the program to stop: %s", error)

    def _learn_deadline(self) -> None:
        """Pass on when SLURM will kill the job, once the supervisor has asked."""
        termination = Termination.read(self._rank.claim_folder)
        if termination is not None and termination.deadline not in (None, self._deadline):
            self._deadline = termination.deadline
            self._write_stop()

    def _collect(self) -> ProgramStacks:
        self._read_events()  # they say which processes write stacks
        may_ask = self._rank.config.run.signal != "USR1"
        return ProgramStacks.collect(
            self._child.process, self.progress.with_stacks if may_ask else (), self._rank.session
        )

    def _write_stacks(self, stacks: ProgramStacks, why: str, token: str) -> None:
        description = self._rank.describe(self.progress.step)
        title = f"{why}: {description}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
        try:
            stacks.write(self._rank.stacks, title, token)
        except OSError as error:
            log.warning("%s: can't write stacks: %s", self._rank.stacks, error.strerror)

    def _record_hang(self, complaint: str) -> None:
        """Record that the program hangs, and kill it.

        Raises:
            HangError: always.
        """
        stacks = self._collect()
        at = f"; it was at {stacks.position}" if stacks.position else ""
        message = f"{complaint}{at}"
        log.warning("%s hangs: %s", self._rank.describe(self.progress.step), message)
        self._write_stacks(stacks, "hang", secrets.token_hex(4))
        alone = self._rank.environment.world_size == 1
        record = self._rank.make_exit_record(Reason.HANG, self.progress.step, f"{message}; stacks: {self._rank.stacks}")
        self._rank.write(replace(record, traceback=stacks.text, blames_peer=stacks.waits and not alone))
        if not alone:
            try:
                request_stacks(self._rank.stacks_request)
            except HpctrainError as error:
                log.warning("%s", error)
            time.sleep(PEERS_S)
        self._child.kill()
        raise HangError(message)

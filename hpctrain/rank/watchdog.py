"""The watchdog of a rank: if the rank hangs, it writes the stacks and ends the process.

It also looks for files by which other processes request the rank's stacks, or a stop.
"""

from __future__ import annotations

import faulthandler
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from hpctrain.attempt.hang import PEERS_S, REQUESTS_EVERY_S, HangWatch, Phase
from hpctrain.config.health import Health
from hpctrain.errors import ExitCode
from hpctrain.rank.rank import FINISH_WRITING_S, Rank
from hpctrain.rank.stacks import STDERR, StackPosition, StackTimer, write_stacks
from hpctrain.run.stacks import StacksRequests

RECORD_HANG_S = 15.0
"""Seconds to write the records of a hang: the file system may be what hangs."""
OWN_ERROR_S = 5.0
"""Seconds in which the watched thread may raise an error by itself, after NCCL has reported one."""
ERRORS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals of a thread's own faults, which must not be blocked."""


class Watchdog:
    """Watches the thread that creates it. A context manager; never collective.

    The watched thread pays nothing: the watchdog reads once a second what the loop records anyway. While a thread keeps
    Python's global lock (GIL), the watchdog can't run; a timer that doesn't need the lock writes the watched thread's
    stack to standard error, and ends the process a minute later.

    Args:
        health: the bounds.
        rank: the rank that the thread runs.
        tick_s: seconds between two looks at the progress.
    """

    def __init__(self, health: Health, rank: Rank, *, tick_s: float = 1.0) -> None:
        self._health = health
        self._rank = rank
        self._tick_s = tick_s
        self._thread_id = threading.get_ident()
        self._timer = StackTimer(ends_process=rank.program is None)
        self._stopped = threading.Event()
        # two threads: one looks for requests on a file system that may be the very thing that hangs
        self._watcher = threading.Thread(target=self._watch, name="hpctrain-watchdog", daemon=True)
        self._listener = threading.Thread(target=self._listen, name="hpctrain-stacks", daemon=True)

    def __enter__(self) -> Watchdog:
        """Start watching."""
        self._watcher.start()
        self._listener.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching, unless the watchdog is recording a hang: then it ends the process."""
        self._stopped.set()
        self._watcher.join(2 * RECORD_HANG_S)
        self._listener.join(REQUESTS_EVERY_S)
        self._timer.cancel()

    def _watch(self) -> None:
        _block_signals()
        watch = HangWatch(self._health, time.monotonic(), self._tick_s)
        while not self._stopped.wait(self._tick_s):
            now = time.monotonic()
            self._rank.stop.check_handlers()
            phase = Phase.of(self._rank.times.doing)
            if complaint := watch.update(phase, self._rank.progress, now):
                if self._rank.program is None:
                    self._end(complaint)
                self._complain(complaint)
                watch = HangWatch(self._health, now, self._tick_s)
            elif self._rank.program is None and (error := self._rank.communication_error):
                self._end_after_nccl_error(error)
            # fires only if this thread can't postpone it in time, because the watched thread keeps the GIL
            self._timer.postpone(phase.bound_s(self._health))

    def _listen(self) -> None:
        _block_signals()
        requests: StacksRequests | None = None
        while not self._stopped.wait(REQUESTS_EVERY_S):
            if (member := self._rank.member) is None:
                continue
            if member.claim.is_cancelled and self._rank.stop.last_signal is None:
                self._rank.stop.ask(signal.SIGTERM)
            requests = requests or StacksRequests(member.stacks_request)
            if (token := requests.new()) is not None:
                self._write("stacks as requested", token)

    def _write(self, why: str, token: str) -> None:
        path = self._rank.stacks
        title = f"{why}: {self._rank.description}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
        try:
            write_stacks(path, title, token)
        except OSError as error:
            os.write(STDERR, f"hpctrain: {path}: can't write stacks: {error.strerror}\n".encode())

    def _complain(self, complaint: str) -> None:
        """Report a hang in a user's program, which only its user may end."""
        text = f"{complaint}; it is at {StackPosition.of(self._thread_id).text}; stacks: {self._rank.stacks}"
        os.write(STDERR, f"hpctrain: {self._rank.description} hangs: {text}; Ctrl-C twice ends it\n".encode())
        self._write("hang", secrets.token_hex(4))

    def _end_after_nccl_error(self, error: str) -> None:
        """End the process after an error of NCCL, unless the watched thread does so."""
        # it usually does, with a better message: the gloo group for messages loses the same rank, or CUDA raises
        if self._stopped.wait(OWN_ERROR_S):
            return
        # it has raised an error, and ends loading processes and open files before `__exit__` is called
        if self._thread_id in sys._current_exceptions() and self._stopped.wait(FINISH_WRITING_S):
            return
        with _process_ending(FINISH_WRITING_S + PEERS_S + RECORD_HANG_S):
            self._rank.record_communication_error(error)

    def _end(self, complaint: str) -> None:
        with _process_ending(RECORD_HANG_S):
            position = StackPosition.of(self._thread_id)
            message = f"{complaint}; it was at {position.text}"
            # not through logging: the watched thread may hold its locks
            os.write(STDERR, f"hpctrain: {self._rank.description} hangs: {message}\n".encode())
            self._write("hang", secrets.token_hex(4))
            self._rank.record_hang(message, position)


@contextmanager
def _process_ending(within_s: float) -> Iterator[None]:
    """Context manager that ends the process after its records are written, or at a bound if that hangs as well."""
    # its stacks are discarded, since `write_stacks` writes them
    faulthandler.dump_traceback_later(within_s, exit=True, file=os.open(os.devnull, os.O_WRONLY))
    try:
        yield
    except BaseException:
        os.write(STDERR, traceback.format_exc().encode())
    finally:
        os._exit(ExitCode.FAILED)


def _block_signals() -> None:
    # a signal goes to any thread that doesn't block it, and Python handles it in the main thread alone
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - set(ERRORS))

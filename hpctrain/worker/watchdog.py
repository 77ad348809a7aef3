"""The watchdog of each rank: ends it, with its stacks, when nothing moves any more, and shows them to who asks."""

from __future__ import annotations

import faulthandler
import os
import secrets
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hpctrain.config.health import Health
from hpctrain.errors import ExitCode
from hpctrain.run.stacks import Requests
from hpctrain.worker.phase import Phase
from hpctrain.worker.position import Position
from hpctrain.worker.silence import Silence
from hpctrain.worker.stacks import STDERR, write_stacks

LAST_WORDS_S = 15.0
"""Bound on all that is still written once a rank hangs: the file system may be what hangs."""
LOOK_S = 2.0
"""Seconds between two looks for a request for stacks."""
ERRORS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals that a thread sends to itself."""


@dataclass(frozen=True, slots=True)
class Hang:
    """What the watchdog saw.

    Attributes:
        message: one line: for how long, which key bounds it, where the rank stood.
        stack: of the watched thread, formatted.
        waits: the rank seems to wait for others; see `Position`.
    """

    message: str
    stack: str
    waits: bool


class Watchdog:
    """Watches the thread that starts it. A context manager; never a collective.

    The watched thread pays nothing: once a second the watchdog reads what the loop notes anyway, and all that is given
    here is called in threads of the watchdog's own: one that ends the rank, and one that looks for requests, since the
    file system that it looks at may be what hangs. It leaves signals alone, and isn't there in a forked child. A thread
    that keeps Python's lock for ever can't be ended by another one, but a timer that needs no lock writes its stacks to
    standard error.

    Args:
        health: the bounds.
        phase: what the rank does now.
        progress: a value that changes as the rank gets on; two are compared by `==`.
        files: where stacks go, and where requests for them come from, as soon as that is known.
        on_hang: says the last words; the process ends after it, or after `LAST_WORDS_S`.
        describe: who and where this is, for the head of the stacks.
        clock: monotonic seconds.
        tick_s: seconds between two looks at the progress.
    """

    def __init__(
        self,
        health: Health,
        *,
        phase: Callable[[], Phase],
        progress: Callable[[], object],
        files: Callable[[], tuple[Path, Path] | None],
        on_hang: Callable[[Hang], None],
        describe: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
        tick_s: float = 1.0,
    ) -> None:
        self._health, self._phase, self._progress = health, phase, progress
        self._files, self._on_hang, self._describe = files, on_hang, describe
        self._clock, self._tick_s = clock, tick_s
        self._requests: Requests | None = None
        self._stopped = threading.Event()

    def __enter__(self) -> Watchdog:
        """Start to watch the calling thread."""
        _spare_forks()
        self._watched = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="hpctrain-watchdog", daemon=True)
        self._thread.start()
        self._listener = threading.Thread(target=self._listen, name="hpctrain-stacks", daemon=True)
        self._listener.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Watch no longer."""
        self._stopped.set()
        # a watchdog that speaks its last words is left to end the process
        self._thread.join(2 * LAST_WORDS_S)
        self._listener.join(LOOK_S)
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        _leave_signals_to_others()
        silence = Silence(self._clock(), 2 * self._tick_s)
        while not self._stopped.wait(self._tick_s):
            now, phase = self._clock(), self._phase()
            if silence.look((phase, self._progress()), now) >= phase.bound_s(self._health):
                self._end(phase.complaint(self._health))
            faulthandler.dump_traceback_later(phase.bound_s(self._health), file=STDERR)

    def _listen(self) -> None:
        _leave_signals_to_others()
        while not self._stopped.wait(LOOK_S):
            self._answer()

    def _answer(self) -> None:
        files = self._files()
        if files is None:
            return
        if self._requests is None:
            self._requests = Requests(files[1])
        token = self._requests.new()
        if token is not None:
            self._write("stacks as asked", token)

    def _write(self, why: str, token: str) -> None:
        files = self._files()
        path = None if files is None else files[0]
        head = f"{why}: {self._describe()}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
        try:
            write_stacks(path, head, token)
        except OSError as error:
            os.write(STDERR, f"hpctrain: {path}: stacks can't be written: {error.strerror}\n".encode())

    def _end(self, complaint: str) -> None:
        faulthandler.dump_traceback_later(LAST_WORDS_S, exit=True, file=os.open(os.devnull, os.O_WRONLY))
        try:
            position = Position.of(self._watched)
            message = f"{complaint}; it was at {position.text}"
            # not by way of logging: the hanging thread may hold its locks
            os.write(STDERR, f"hpctrain: {self._describe()} hangs: {message}\n".encode())
            self._write("hang", secrets.token_hex(4))
            self._on_hang(Hang(message, position.stack, position.waits))
        except BaseException:
            os.write(STDERR, traceback.format_exc().encode())
        finally:
            os._exit(ExitCode.FAILED)


def _leave_signals_to_others() -> None:
    """Another thread's mask may leave this one as the only thread that a signal can go to."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - set(ERRORS))


_forks_are_spared = False


def _spare_forks() -> None:
    """A child that is forked while faulthandler's timer runs waits at its exit for a thread that it doesn't have."""
    global _forks_are_spared  # noqa: PLW0603 - once per process, as the registration is
    if not _forks_are_spared:
        os.register_at_fork(before=faulthandler.cancel_dump_traceback_later)
        _forks_are_spared = True

"""The request to stop: signal handlers that set a flag; they are restored if a library replaces them."""

from __future__ import annotations

import ctypes
import functools
import inspect
import logging
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from types import FrameType
from typing import Any

from hpctrain.run.process import may_handle_signals

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
HANDLED = (*STOP_SIGNALS, signal.SIGHUP)
"""The signals that a `StopRequest` handles: a process learns by SIGHUP that its terminal was closed."""
_NO_CALL = object()
"""In place of the frame that a library's handler was called with, while none is running."""

log = logging.getLogger("hpctrain.train")


class StopKind(IntEnum):
    """Reason for which ranks stop. If several ranks request a stop, all act upon the largest value."""

    SIGNAL = 1
    """A signal arrived: save, then leave."""
    ERROR = 2
    """A rank failed in a way that other ranks can't see, such as in its writing thread: raise, without a save."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop, requested by one rank or agreed upon by all.

    Attributes:
        kind: why the ranks stop.
        signal: the signal's number; 0 without a signal.
    """

    kind: StopKind
    signal: int = 0


class StopRequest:
    """Set by the first signal that asks this process to stop; the loop reads it between steps.

    A handler doesn't save: it may interrupt the allocator, a collective, or another save.

    SIGTERM and the user signals come from a scheduler, SIGINT from a person, SIGHUP from a closed terminal. A second
    SIGINT raises KeyboardInterrupt at once. A third one is ignored: it would only interrupt the process while it
    records its end.

    A library that the task uses may replace the handlers, or block the signals, at any time. `pending` then restores
    them, the first time that it is read and after each `check_handlers`. A library's handler in Python is called after
    hpctrain's.

    Attributes:
        error: the error that stops all ranks; None without one.
        last_signal: the signal that arrived last; None before the first one.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.last_signal: signal.Signals | None = None
        self._on_signal: Callable[[], None] | None = None
        self._largest_signal = 0
        self._interrupts = 0
        self._has_news = False
        self._installed: list[signal.Signals] = []
        self._entry_point = 0
        self._chained: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._chained_frame: object = _NO_CALL
        self._warned: set[str] = set()

    @property
    def pending(self) -> Stop | None:
        """The stop that this rank requests; None without one. Read it in the thread that called `install`."""
        if not self._has_news:
            return None
        # set to False before anything is read: what arrives from now on sets it again
        self._has_news = False
        self._restore_handlers()
        # computed from two fields: the handler sets one and the writing thread the other, so neither undoes the other
        if self.error is None and not self._largest_signal:
            return None
        self._has_news = True
        return Stop(StopKind.SIGNAL if self.error is None else StopKind.ERROR, self._largest_signal)

    def fail(self, error: Exception) -> None:
        """Request a stop of all ranks because of an error on this one; may be called from any thread."""
        self.error = error
        self._has_news = True

    def ask(self, number: signal.Signals) -> None:
        """Request a stop as if a signal had arrived; may be called from any thread."""
        self.last_signal = number
        # the largest: ranks that got different signals must name one, and the maximum is what an all-reduce gives
        self._largest_signal = max(self._largest_signal, number)
        self._has_news = True

    def call_on_signal(self, function: Callable[[], None] | None) -> None:
        """Have the handler call a function after each signal, which may raise; None for no call."""
        self._on_signal = function

    def check_handlers(self) -> None:
        """Have the next reader of `pending` check the handlers; may be called from any thread."""
        self._has_news = True

    def install(self) -> None:
        """Handle the signals from now on. Another thread than the main one can't, and leaves them as they are.

        A launcher may have started this process with the signals blocked, so that none arrives before this call.
        """
        if not may_handle_signals():
            return
        for number in HANDLED:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._handle)
                self._installed.append(number)
        self._entry_point = _c_handler(signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        self._has_news = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._chained_frame is not _NO_CALL and frame in (None, self._chained_frame):
            return  # a library's handler calls the one that it replaced: this one
        self._interrupts += number == signal.SIGINT
        if number == signal.SIGINT and self._interrupts == 2:
            raise KeyboardInterrupt
        self.ask(signal.Signals(number))
        if number in self._chained and self._interrupts < 2:
            self._call_chained(number, frame)
        if self._on_signal is not None:
            self._on_signal()

    def _call_chained(self, number: int, frame: FrameType | None) -> None:
        self._chained_frame = frame
        try:
            self._chained[number](number, frame)
        except BaseException:
            # SystemExit or KeyboardInterrupt would end the run before it is saved; a second Ctrl-C is to end it
            if self._interrupts > 1:
                raise
        finally:
            self._chained_frame = _NO_CALL

    def _restore_handlers(self) -> None:
        """Restore the handlers that a library has replaced, and unblock the signals; one warning for each library."""
        if not self._installed:
            return
        blocked = set(STOP_SIGNALS) & signal.pthread_sigmask(signal.SIG_BLOCK, ())
        if blocked:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
            self._warn("a library has blocked", blocked, "unblocked them")
        replaced = defaultdict(list)
        for number in self._installed:
            if change := self._replacement(number):
                replaced[change].append(number)
                signal.signal(number, self._handle)
        for (what, remedy), numbers in replaced.items():
            self._warn(what, numbers, remedy)

    def _replacement(self, number: signal.Signals) -> tuple[str, str] | None:
        """Return how a library replaced the handler of a signal, and the remedy; None if it is still this object's."""
        handler = signal.getsignal(number)
        if handler == self._handle:
            # a C library changes the handler without Python's knowledge, and so does faulthandler.register
            address = _c_handler(number)
            if address == self._entry_point:
                return None
            handler = signal.Handlers(address) if address in tuple(signal.Handlers) else None
        if handler is None:
            return "a library in C has replaced the handlers of", "restored its own, and calls no other"
        if not callable(handler) or handler is signal.default_int_handler:
            name = "Python's own handler" if callable(handler) else signal.Handlers(handler).name
            return f"a library has set {name} for", "restored its handlers"
        self._chained[number] = handler
        return f"{_origin(handler)} has replaced the handlers of", "restored its own, and calls the others after them"

    def _warn(self, change: str, numbers: Iterable[signal.Signals], remedy: str) -> None:
        if change not in self._warned:
            self._warned.add(change)
            names = ", ".join(number.name for number in sorted(numbers))
            log.warning("%s %s, at which a run saves and stops; hpctrain has %s", change, names, remedy)


_libc = ctypes.CDLL(None)


def _c_handler(number: signal.Signals) -> int:
    """The address of the C function that handles a signal; 0 for SIG_DFL, 1 for SIG_IGN."""
    # struct sigaction of Linux's C libraries begins with it, and has at most 152 bytes
    action = ctypes.create_string_buffer(256)
    _libc.sigaction(int(number), None, action)
    return int.from_bytes(action.raw[: ctypes.sizeof(ctypes.c_void_p)], sys.byteorder)


def _origin(handler: Callable[..., object]) -> str:
    """The module of a handler, and its file if that is known."""
    function = handler.func if isinstance(handler, functools.partial) else handler
    function = inspect.unwrap(function)
    if not hasattr(function, "__qualname__"):  # an object that can be called
        function = type(function).__call__
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    file = "" if code is None else f" ({code.co_filename})"
    return f"{getattr(function, '__module__', None) or 'a library'}{file}"  # builtins may have none

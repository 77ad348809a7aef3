"""The request to stop: signal handlers that set a flag and do nothing else."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import IntEnum
from types import FrameType

from hpctrain.run.process import may_handle_signals

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
HANDLED = (*STOP_SIGNALS, signal.SIGHUP)
"""The signals that a `StopRequest` handles: a process learns by SIGHUP that its terminal was closed."""


class StopKind(IntEnum):
    """Why ranks stop. If several ranks request a stop, all act upon the largest value."""

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

    SIGTERM and the user signals come from a scheduler, SIGINT from a person, SIGHUP from a closed terminal. A second
    SIGINT raises KeyboardInterrupt at once. A third one is ignored: it would only interrupt the process while it
    records its end.

    Attributes:
        error: the error that stops all ranks; None without one.
        last_signal: the signal that arrived last; None before the first one.
    """

    __slots__ = ("_interrupts", "_largest_signal", "error", "last_signal")

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.last_signal: signal.Signals | None = None
        self._largest_signal = 0
        self._interrupts = 0

    @property
    def pending(self) -> Stop | None:
        """The stop that this rank requests; None without one."""
        # computed from two fields: the handler sets one and the writing thread the other, so neither undoes the other
        if self.error is not None:
            return Stop(StopKind.ERROR, self._largest_signal)
        return Stop(StopKind.SIGNAL, self._largest_signal) if self._largest_signal else None

    def fail(self, error: Exception) -> None:
        """Request a stop of all ranks because of an error on this one; may be called from any thread."""
        self.error = error

    def ask(self, number: signal.Signals) -> None:
        """Request a stop as if a signal had arrived; may be called from any thread."""
        self.last_signal = number
        # the largest: ranks that got different signals must name one, and the maximum is what an all-reduce gives
        self._largest_signal = max(self._largest_signal, number)

    def install(self) -> None:
        """Handle the signals from now on. Another thread than the main one can't, and leaves them as they are.

        A launcher may have started this process with the signals blocked, so that none arrives before this call.
        """
        if not may_handle_signals():
            return
        for number in HANDLED:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if number == signal.SIGINT and self._interrupts == 2:
            raise KeyboardInterrupt
        self.ask(signal.Signals(number))

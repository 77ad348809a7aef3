"""The wish to stop: signal handlers that set a flag and nothing else."""

from __future__ import annotations

import signal
from types import FrameType

TROUBLE = 1000
"""Stands where a signal's number would, for an error that one rank must share with all."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class StopFlag:
    """Set by the first signal that asks this process to stop; the loop reads it between steps.

    SIGTERM and the user signals come from a scheduler, SIGINT from a person: a second SIGINT doesn't wait for the step
    to end. A third one does nothing more: it would only keep this process from its last words.
    """

    __slots__ = ("_interrupts", "number", "signal", "trouble")

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.trouble: Exception | None = None
        self.number = 0
        """Of the signal that asked for a stop, or TROUBLE; 0 for none."""
        self._interrupts = 0

    def fail(self, error: Exception) -> None:
        """Have the ranks stop for an error of this one's; from any thread."""
        self.trouble = error
        self.number = TROUBLE

    def install(self) -> None:
        """Handle the signals from now on; to be called in the main thread.

        A launcher may have started this process with the signals blocked, so that none comes before this.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if number == signal.SIGINT and self._interrupts == 2:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        self.number = max(self.number, number)

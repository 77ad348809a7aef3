"""The signals that this process receives, as a file that an event loop waits for."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType

from hpctrain.rank.stop_request import STOP_SIGNALS

RECEIVED = (*STOP_SIGNALS, signal.SIGCHLD)


class Signals:
    """Receives the stop signals and SIGCHLD inside its context, also those that were blocked before it.

    Attributes:
        descriptor: readable when a signal has arrived.
    """

    def __init__(self) -> None:
        self.descriptor, self._written = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> Signals:
        """Receive signals from now on."""
        signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
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
        os.close(self._written)

    def read(self) -> list[signal.Signals]:
        """The signals since the last call, oldest first."""
        try:
            numbers = os.read(self.descriptor, 4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers]


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the number is in the pipe by now, which takes a handler of Python's."""

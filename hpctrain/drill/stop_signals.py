"""The signals that stop a drill, and with it its runs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hpctrain.run.process import handlers_restored

HANDLED = (signal.SIGTERM, signal.SIGHUP)
"""Those that would end Python without an exception: of `timeout`, of a shutdown, and of a closed terminal."""


class StopSignal(KeyboardInterrupt):
    """A signal that stops the drill like Ctrl-C.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


@contextmanager
def stop_signals_raised() -> Iterator[None]:
    """Inside the context, the first SIGTERM or SIGHUP raises StopSignal; in the main thread alone."""
    is_stopping = False

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - Python's signature
        nonlocal is_stopping
        # `timeout` sends its signal twice, to the process and to its group
        if not is_stopping:
            is_stopping = True
            raise StopSignal(number)

    with handlers_restored(HANDLED):
        for number in HANDLED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, stop)
        yield


def stopped_by(interrupt: KeyboardInterrupt) -> str:
    """What stopped a drill: the name of a signal, or Ctrl-C."""
    return signal.Signals(interrupt.number).name if isinstance(interrupt, StopSignal) else "Ctrl-C"

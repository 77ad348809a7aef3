"""The signals that SLURM sends to a batch script.

This module imports nothing that is slow: a program blocks the signals before its other imports.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable

WATCHED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that must not end the batch script's process."""

log = logging.getLogger("hpctrain.supervise")


def catch_signals() -> int:
    """Catch the signals that SLURM sends, from now on; return a file descriptor from which to read their numbers."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    # Python runs handlers only in the main thread, and that one may be blocked in a read from srun
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in WATCHED:
        # the ranks get these from SLURM themselves; this process has to outlive them
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    return read_end


def watch_signals(read_end: int, check: Callable[[], None]) -> threading.Thread:
    """Log the signals from now on, and check the job at each SIGTERM, in a thread, which is returned.

    Args:
        read_end: the result of `catch_signals`.
        check: finds out whether SLURM is killing the job.
    """

    def watch() -> None:
        while numbers := os.read(read_end, 64):
            for number in numbers:
                log.info("%s received", signal.Signals(number).name)
            if signal.SIGTERM in numbers:
                check()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def ignore_signals() -> None:
    """Ignore the signals from now on, at the end of the process.

    At its end Python restores default handlers. Then the SIGTERM that follows a requeue would end this process, and the
    shell would start another supervisor.
    """
    for number in WATCHED:
        signal.signal(number, signal.SIG_IGN)

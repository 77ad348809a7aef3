"""A second process that records how an attempt ended if the one that trains dies without being able to."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from hpctrain.errors import ExitCode
from hpctrain.worker.entry import PR_SET_PDEATHSIG

LOOK_S = 5.0
"""Seconds between two looks at the parent, for a kernel without the signal below."""


@contextlib.contextmanager
def witnessed(conclude: Callable[[], object]) -> Iterator[None]:
    """Inside the context, the death of this process has another one call ``conclude``: a crash, a kill, `os._exit`.

    A process in which a task calls `os._exit(0)` ends with an exit code that isn't success.
    """
    # what is buffered would be written twice
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    witness = 0
    ready, is_ready = os.pipe()
    with contextlib.suppress(OSError):  # no memory for another process
        witness = os.fork()
        if not witness:
            _wait_and_conclude(parent, is_ready, conclude)
    os.close(is_ready)
    os.read(ready, 1)
    os.close(ready)
    really_exit = os._exit

    def exit_failed(status: int) -> NoReturn:
        # loading processes, which were forked, end by it in good order
        really_exit(status or ExitCode.FAILED if os.getpid() == parent else status)

    os._exit = exit_failed
    try:
        yield
    finally:
        os._exit = really_exit
        if witness:
            os.kill(witness, signal.SIGKILL)
            os.waitpid(witness, 0)


def _wait_and_conclude(parent: int, is_ready: int, conclude: Callable[[], object]) -> NoReturn:
    try:
        # not the terminal's signals, and not those for the parent's process group
        os.setsid()
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR2, 0, 0, 0)
        os.close(is_ready)
        while os.getppid() == parent:
            signal.sigtimedwait({signal.SIGUSR2}, LOOK_S)
        conclude()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(ExitCode.FAILED)

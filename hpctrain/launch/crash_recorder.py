"""A second process that records how an attempt ended if the training process dies before it can."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from typing import NoReturn

from hpctrain.distributed.stop_request import STOP_SIGNALS
from hpctrain.errors import ExitCode
from hpctrain.run.process import PR_SET_PDEATHSIG, signals_blocked
from hpctrain.streams import flush_output

LOOK_S = 5.0
"""Seconds between two checks of the parent, in case the kernel doesn't send the parent-death signal."""
CONCLUDE_S = 60
"""Whole seconds for `conclude`; on a hanging file system, the recorder then exits without a record."""


@contextlib.contextmanager
def crash_recorder(conclude: Callable[[], object]) -> Iterator[None]:
    """While in the context, have a second process call ``conclude`` if this one crashes, is killed or calls `os._exit`.

    The second process is a fork that keeps only the standard streams open; ``conclude`` opens its own files. It is a
    child of this process for the whole context, so a task that waits until it has no children waits forever. If a task
    calls `os._exit(0)`, this process exits with a failure code instead.
    """
    flush_output()  # otherwise the fork would write buffered output a second time
    parent = os.getpid()
    recorder = 0
    really_exit = os._exit

    def exit_failed(status: int) -> NoReturn:
        # forked DataLoader workers exit normally through os._exit
        really_exit(status or ExitCode.FAILED if os.getpid() == parent else status)

    try:
        # a Ctrl-C at the fork would run the rest of the program twice, or leave the recorder behind
        with signals_blocked(STOP_SIGNALS):
            recorder = _start(conclude)
        os._exit = exit_failed
        yield
    finally:
        os._exit = really_exit
        if recorder:
            # the task may have reaped all children, or SIGCHLD may be ignored (perhaps already in the parent)
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(recorder, signal.SIGKILL)
                os.waitpid(recorder, 0)


def _start(conclude: Callable[[], object]) -> int:
    """Return the recorder's process id once it watches this process; 0 if the fork failed."""
    parent = os.getpid()
    ready, is_ready = os.pipe()
    recorder = 0
    with contextlib.suppress(OSError):
        recorder = os.fork()
        if not recorder:
            _wait_and_conclude(parent, is_ready, conclude)
    os.close(is_ready)
    os.read(ready, 1)
    os.close(ready)
    return recorder


def _wait_and_conclude(parent: int, is_ready: int, conclude: Callable[[], object]) -> NoReturn:
    try:
        # not the terminal's signals, and not those for the parent's process group
        os.setsid()
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR2, 0, 0, 0)
        # the parent's ports, locks and devices: a resume may need them while this process concludes
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers
            if int(name) > 2 and int(name) != is_ready:
                with contextlib.suppress(OSError):  # that of this list is closed already
                    os.close(int(name))
        os.close(is_ready)
        while os.getppid() == parent:
            signal.sigtimedwait({signal.SIGUSR2}, LOOK_S)
        # the kernel's, not Python's: a thread of the parent may have held a lock at the fork
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        signal.alarm(CONCLUDE_S)
        conclude()
        flush_output()
    finally:
        os._exit(ExitCode.FAILED)

"""A second process that records how an attempt ended if the training process dies before it can."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
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
STACK_BYTES = 1 << 16
"""Most bytes of a crash report; faulthandler drops what a pipe of the kernel's default size doesn't hold."""
_FATAL = re.compile(r"Fatal Python error: (.*)")


@contextlib.contextmanager
def crash_recorder(conclude: Callable[[signal.Signals | None], object]) -> Iterator[None]:
    """While in the context, have a second process call ``conclude`` if this one crashes, is killed or calls `os._exit`.

    The second process is a fork that keeps only the standard streams open; ``conclude`` opens its own files. It is a
    child of this process for the whole context, so a task that waits until it has no children waits forever. If a task
    calls `os._exit(0)`, this process exits with a failure code instead. The recorder prints the Python stack of a
    crash, unless the program has enabled faulthandler itself.

    Args:
        conclude: gets the signal of a crash, which the recorder learns from faulthandler; None if it doesn't know.
    """
    flush_output()  # otherwise the fork would write buffered output a second time
    parent = os.getpid()
    recorder = 0
    really_exit = os._exit
    report, report_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    enables = not faulthandler.is_enabled()

    def exit_failed(status: int) -> NoReturn:
        # forked DataLoader workers exit normally through os._exit
        really_exit(status or ExitCode.FAILED if os.getpid() == parent else status)

    try:
        # a Ctrl-C at the fork would run the rest of the program twice, or leave the recorder behind
        with signals_blocked(STOP_SIGNALS):
            recorder = _start(report, conclude)
        os._exit = exit_failed
        if enables:
            faulthandler.enable(report_writer)
        yield
    finally:
        os._exit = really_exit
        if enables:
            faulthandler.disable()
        os.close(report)
        os.close(report_writer)
        if recorder:
            # the task may have reaped all children, or SIGCHLD may be ignored (perhaps already in the parent)
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(recorder, signal.SIGKILL)
                os.waitpid(recorder, 0)


def _start(report: int, conclude: Callable[[signal.Signals | None], object]) -> int:
    """Return the recorder's process id once it watches this process; 0 if the fork failed."""
    parent = os.getpid()
    ready, is_ready = os.pipe()
    recorder = 0
    with contextlib.suppress(OSError):
        recorder = os.fork()
        if not recorder:
            _wait_and_conclude(parent, is_ready, report, conclude)
    os.close(is_ready)
    os.read(ready, 1)
    os.close(ready)
    return recorder


def _wait_and_conclude(
    parent: int, is_ready: int, report: int, conclude: Callable[[signal.Signals | None], object]
) -> NoReturn:
    try:
        # not the terminal's signals, and not those for the parent's process group
        os.setsid()
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR2, 0, 0, 0)
        # the parent's ports, locks and devices: a resume may need them while this process concludes
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers
            if int(name) > 2 and int(name) not in (is_ready, report):
                with contextlib.suppress(OSError):  # that of this list is closed already
                    os.close(int(name))
        os.close(is_ready)
        while os.getppid() == parent:
            signal.sigtimedwait({signal.SIGUSR2}, LOOK_S)
        # the kernel's, not Python's: a thread of the parent may have held a lock at the fork
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        signal.alarm(CONCLUDE_S)
        conclude(_signal_of(report))
        flush_output()
    finally:
        os._exit(ExitCode.FAILED)


def _signal_of(report: int) -> signal.Signals | None:
    """Print the report of a crash, if there is one, close it, and return the crash's signal."""
    with contextlib.suppress(BlockingIOError), open(report, "rb", buffering=0) as stream:  # nothing was written
        text = os.read(stream.fileno(), STACK_BYTES)
        os.write(2, text)
        if found := _FATAL.search(text.decode(errors="replace")):
            names = {signal.strsignal(number): number for number in signal.Signals}
            # "Floating-point exception" since Python 3.14
            return names.get(found[1].replace("-", " "))
    return None

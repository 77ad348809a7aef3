"""The Python stacks of this process: written on request, or by a timer while a thread keeps Python's lock (GIL)."""

from __future__ import annotations

import ctypes
import faulthandler
import math
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from hpctrain.run.stacks import framed

STDERR = 2
SIGNAL = getattr(signal, "SIGRTMAX", 64) - 5
"""Signal of the timer: a real-time one, which neither Python nor a common library uses."""
ENDS_AFTER_S = int(SIGNAL)
"""Seconds from the stack to the end of the process: alarm(3) takes the signal's number for a number of seconds."""
_THREAD = 4
"""SIGEV_THREAD_ID of Linux: the signal goes to one thread."""
_WAITING = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/hpctrain/parallel/", "/hpctrain/rank/")
"""Parts of the paths of modules whose innermost call waits for other ranks."""
_OWN = tuple(f"/hpctrain/rank/{name}.py" for name in ("entry", "rank", "stacks", "watchdog"))
"""Modules of `rank` that never wait for other ranks."""
_BACKWARD = "/torch/autograd/graph.py"
"""DDP waits for the other ranks' gradients in this module, in C++ frames that Python doesn't show."""


def waits_for_peers(path: str) -> bool:
    """Whether a rank whose innermost Python frame is in this module waits for other ranks.

    A guess: on a GPU a rank waits wherever it first needs a result, and only `run.exit_record.Collectives` shows it.
    """
    path = path.replace(os.sep, "/")
    if path.endswith(_OWN):
        return False
    return any(part in path for part in _WAITING) or path.endswith(_BACKWARD)


def write_stacks(path: Path | None, title: str, token: str) -> None:
    """Append the stacks of all threads of this process.

    Args:
        path: the file; standard error is used if it is None or can't be opened.
        title: first line: rank, host, time.
        token: marks the beginning and the end.
    """
    try:
        file = STDERR if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError:
        file = STDERR
    begin, end = framed(title, token)
    names = "".join(f"0x{thread.ident or 0:016x} is {thread.name}\n" for thread in threading.enumerate())
    try:
        os.write(file, f"{begin}{names}\n".encode())
        # unlike the traceback module, this allocates no memory, takes no locks and reads no source files, so it works
        # in a process in which hardly anything else does
        faulthandler.dump_traceback(file, all_threads=True)
        os.write(file, end.encode())
    finally:
        if file != STDERR:
            os.close(file)


@dataclass(frozen=True, slots=True)
class StackPosition:
    """A thread's innermost Python frame, and its stack.

    Attributes:
        text: function, file and line.
        stack: formatted, outermost call first; empty if the thread has ended.
        waits: whether it is in a collective or a backward pass, where a rank waits for the others, so that the cause is
            probably elsewhere. A guess: on a GPU a rank waits wherever it first needs a result.
    """

    text: str
    stack: str
    waits: bool

    @classmethod
    def of(cls, thread_id: int) -> StackPosition:
        """The position of a thread of this process, by its `threading.get_ident()`."""
        frame = sys._current_frames().get(thread_id)
        if frame is None:
            return cls("a thread that has ended", "", waits=False)
        code = frame.f_code
        return cls(
            text=f"{code.co_name} in {code.co_filename}:{frame.f_lineno}",
            stack="".join(traceback.format_stack(frame)),
            waits=waits_for_peers(code.co_filename),
        )


class _Expiry(ctypes.Structure):
    """``struct sigevent`` of Linux's signal.h: what happens when a timer expires."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("unused", ctypes.c_char * 44),
    )


class _Setting(ctypes.Structure):
    """``struct itimerspec`` of time.h: interval and time left, each in seconds and nanoseconds."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("left_s", ctypes.c_long),
        ("left_ns", ctypes.c_long),
    )


class StackTimer:
    """Writes the stack of the thread that creates it to standard error, unless it is postponed in time.

    The kernel signals that thread (timer_create(2)), which writes its own stack. `faulthandler.dump_traceback_later`
    is not for this: its thread reads the frames of all others while they run. In a process that continues after it was
    suspended (SIGSTOP, `scontrol suspend`), that timer has expired meanwhile, and some of them died of it with SIGSEGV.

    If it isn't postponed within another `ENDS_AFTER_S` either, the process ends by SIGALRM. These seconds begin when
    the thread writes its stack, so a process that was suspended has them to postpone the timer.

    A forked child doesn't have the timer. Without Linux it never fires.

    Args:
        ends_process: whether the process ends; False if it is a user's own.
    """

    def __init__(self, *, ends_process: bool = True) -> None:
        self._timer: ctypes.c_void_p | None = None
        self._library: ctypes.CDLL | None = None
        self._ends_process = ends_process
        self._armed = False
        self._alarm_until = 0.0
        if sys.platform == "linux":
            self._library = _library()
            faulthandler.unregister(SIGNAL)  # of an earlier timer: registered twice, it keeps the first handler
            if ends_process:
                # Only functions in C run without the lock: after the stack, faulthandler calls the earlier handler.
                self._library.signal.restype = ctypes.c_void_p
                self._library.signal(int(SIGNAL), self._library.alarm)
            faulthandler.register(SIGNAL, file=STDERR, all_threads=False, chain=ends_process)
            self._timer = _timer(self._library, threading.get_native_id())

    def postpone(self, seconds: float) -> None:
        """Let it fire after so many seconds from now, and not before."""
        whole_s = math.floor(seconds)
        self._set(whole_s, max(1, int((seconds - whole_s) * 1e9)))

    def cancel(self) -> None:
        """Keep it from firing until it is postponed again."""
        self._set(0, 0)

    def _set(self, seconds: int, nanoseconds: int) -> None:
        if self._library is None:
            return
        before, after = _Setting(), _Setting(0, 0, seconds, nanoseconds)
        self._library.timer_settime(self._timer, 0, ctypes.byref(after), ctypes.byref(before))
        if self._ends_process:
            self._cancel_alarm(has_fired=self._armed and not (before.left_s or before.left_ns))
            self._armed = bool(seconds or nanoseconds)

    def _cancel_alarm(self, *, has_fired: bool) -> None:
        now = time.monotonic()
        if has_fired:
            self._alarm_until = now + ENDS_AFTER_S
        # Not once: in a process that continues after it was suspended, the handler may still be writing the stack, and
        # sets the alarm only after that. And not always: an alarm may be the user's own.
        if now < self._alarm_until:
            assert self._library is not None
            self._library.alarm(0)


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    # before version 2.34, glibc had it in a library of its own
    return library if hasattr(library, "timer_create") else ctypes.CDLL("librt.so.1", use_errno=True)


def _timer(library: ctypes.CDLL, thread: int) -> ctypes.c_void_p:
    timer, expiry = ctypes.c_void_p(), _Expiry(signo=SIGNAL, notify=_THREAD, thread=thread)
    if library.timer_create(1, ctypes.byref(expiry), ctypes.byref(timer)):  # 1: CLOCK_MONOTONIC
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return timer

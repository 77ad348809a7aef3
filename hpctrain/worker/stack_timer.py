"""A timer that writes a thread's stack, and then ends the process, while a thread keeps Python's global lock (GIL)."""

from __future__ import annotations

import ctypes
import faulthandler
import math
import os
import signal
import sys
import threading
import time

STDERR = 2
SIGNAL = getattr(signal, "SIGRTMAX", 64) - 5
"""Signal of the timer: a real-time one, which neither Python nor a common library uses."""
ENDS_AFTER_S = int(SIGNAL)
"""Seconds from the stack to the end of the process: alarm(3) takes the signal's number for a number of seconds."""
_THREAD = 4
"""SIGEV_THREAD_ID of Linux: the signal goes to one thread."""


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
    is not for this: its thread reads the frames of all others while they run. In a process that goes on after it was
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
        whole = math.floor(seconds)
        self._set(whole, max(1, int((seconds - whole) * 1e9)))

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

"""A thread that keeps Python's lock while its timer fires; the first argument says what follows."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

from hpctrain.rank.stacks import StackTimer

library = ctypes.PyDLL(None)


def alarm_s():
    return round(signal.getitimer(signal.ITIMER_REAL)[0])


def awakes():
    StackTimer()  # of an earlier training in the same process
    timer = StackTimer()
    timer.postpone(0.2)
    print(alarm_s())
    library.sleep(5)  # until the signal interrupts it
    print(alarm_s())
    timer.postpone(3600)
    print(alarm_s())
    timer = StackTimer()  # which has not fired
    signal.alarm(1000)  # the user's own
    timer.postpone(3600)
    timer.cancel()
    print(alarm_s())


def is_suspended():
    """Its stack is deep, so that the handler is at work for long, while another thread postpones the timer at once."""
    timer = StackTimer()

    def postpone():
        while True:
            timer.postpone(0.5)
            time.sleep(0.05)

    def wait(depth):
        if depth:
            return wait(depth - 1)
        print("ready", flush=True)
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            time.sleep(0.02)
        return alarm_s()

    threading.Thread(target=postpone, daemon=True).start()
    print(wait(90), flush=True)
    os._exit(0)


def belongs_to_a_user():
    StackTimer(ends_process=False).postpone(0.2)
    library.sleep(5)
    print(alarm_s())


def keeps_it():
    StackTimer().postpone(0.2)
    while True:
        library.sleep(5)


globals()[sys.argv[1]]()

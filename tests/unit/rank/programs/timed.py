"""A thread whose timer fires again and again while it and others call and return; prints how often at least."""

from __future__ import annotations

import sys
import threading
import time

from hpctrain.rank.stacks import StackTimer


def call(depth):
    return call(depth - 1) + 1 if depth else 0


def call_on():
    while True:
        call(30)


sys.setswitchinterval(1e-5)
for _ in range(2):
    threading.Thread(target=call_on, daemon=True).start()
timer = StackTimer()
for _ in range(200):
    timer.postpone(0.001)
    end = time.monotonic() + 0.005
    while time.monotonic() < end:
        call(20)
timer.postpone(0.001)
timer.cancel()
timer.postpone(3600)
print("the end")

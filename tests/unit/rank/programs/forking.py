"""A watched process that forks again and again while its watchdog starts its timer; prints how many children hang."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from types import SimpleNamespace

from hpctrain.config.health import Health
from hpctrain.rank.stop_request import StopRequest
from hpctrain.rank.watchdog import Watchdog

FORKS = 300


class Rank:
    times = SimpleNamespace(doing="train_s")
    stacks = member = program = None
    communication_error = ""
    stop = StopRequest()

    @property
    def progress(self):
        return time.monotonic()


def hangs(child):
    deadline = time.monotonic() + 20
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return True
        time.sleep(0.0005)
    return False


sys.setswitchinterval(1e-6)
hanging = 0
with Watchdog(Health(), Rank(), tick_s=1e-5):
    for _ in range(FORKS):
        child = os.fork()
        if child == 0:
            faulthandler.cancel_dump_traceback_later()  # as at a process's exit
            os._exit(0)
        hanging += hangs(child)
        if hanging:
            break
print(hanging)
os._exit(0)

"""Forks ranks of programs, as `python -m hpctrain.program` starts them, from a process that has imported all they need.

It reads a JSON line per rank, and prints the number of its process, and later `NUMBER CODE` when that has ended.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from pathlib import Path

from hpctrain.program import loop
from hpctrain.program.workload import ProgramWorkload
from hpctrain.rank.entry import main as run_rank
from hpctrain.rank.stop_request import STOP_SIGNALS

# ten times as often as for users
for name in ("CHECK_EVERY_S", "REQUESTS_EVERY_S", "PEERS_S", "OTHER_PROCESSES_S"):
    setattr(loop, name, getattr(loop, name) / 10)


def rank(order):
    signal.set_wakeup_fd(-1)
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(order["variables"])
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.argv[1:] = [order["run"]]
    run_rank(ProgramWorkload)


def main():
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # as a launcher does
    woken, waker = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    orders = os.fdopen(os.dup(0), "rb", buffering=0)
    while True:
        ready, _, _ = select.select([orders, woken], [], [])
        if orders in ready:
            line = orders.readline()
            if not line:
                return
            pid = os.fork()
            if pid == 0:
                try:
                    rank(json.loads(line))
                finally:
                    sys.stdout.flush()
                    os._exit(99)
            print(pid, flush=True)
        if woken in ready:
            os.read(woken, 1000)
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) if has_children() else None) is not None:
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            print(ended.si_pid, code, flush=True)


def has_children():
    return bool(Path(f"/proc/self/task/{os.getpid()}/children").read_text())


main()

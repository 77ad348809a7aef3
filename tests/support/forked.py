"""The other side of `fork_server.py`: a process that has imported torch, and forks the processes that it is asked for.

It reads one JSON line per process to start, answers with the process's pid, and with its exit code when it ends. It has
one thread, as a process that forks must.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import sys
import traceback
from pathlib import Path

PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def preload():
    import torch

    from hpctrain.config.compose import Composer

    for name in ("cli.train", "cli.resume", "launch.launcher", "launch.local", "worker.attempt"):
        importlib.import_module(f"hpctrain.{name}")
    torch.optim.AdamW(torch.nn.Linear(1, 1).parameters())  # imports torch._dynamo, for a second
    Composer().compose([])
    # else each child's first collections would look through all that torch has made, and copy its pages
    gc.collect()
    gc.freeze()


def child(order):
    """Run `target`, MODULE:FUNCTION, which returns an exit code or a result, as a process of its own."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()  # processes that it leaves running are found by their session
    signal.set_wakeup_fd(-1)
    for number in (*STOP_SIGNALS, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["variables"])
    module, _, function = order["target"].partition(":")
    try:
        result = getattr(importlib.import_module(module), function)(*order["arguments"])
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 99
    if result is None or isinstance(result, int):
        return result or 0
    Path(order["result"]).write_text(json.dumps(result))
    return 0


def start(order):
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        code = child(order)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main():
    preload()
    waker, woken = os.pipe()
    for descriptor in (waker, woken):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(waker, selectors.EVENT_READ)
    orders, pending = {}, b""
    while True:
        ready = {key.fd for key, _ in selector.select()}
        if waker in ready:
            os.read(waker, 4096)
        if 0 in ready:
            data = os.read(0, 1 << 20)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = start(order)
                orders[pid] = order["number"]
                print(json.dumps({"number": order["number"], "pid": pid}), flush=True)
        while orders:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            answer = {"number": orders.pop(pid), "code": os.waitstatus_to_exitcode(status)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

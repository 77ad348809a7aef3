"""The share of a core that `top` takes over many runs, half of which grow.

    python tests/benchmarks/top.py [--runs 500] [--seconds 60] [--every 2]

Starts `top` on a pseudo-terminal of 80 by 24 and one of 200 by 60, over the runs of a sweep with a squeue that answers
at once; another process appends a record to the metrics and a line to the log of each growing run every few seconds.
CPU time is that of `top` and of the squeues it starts, from the moment at which all runs are shown. The goal is 5 % of
a core for 500 runs.
"""

from __future__ import annotations

import argparse
import fcntl
import multiprocessing
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

from tests.support.many_runs import STEPS, ManyRuns

GOAL = 5.0
SETTLE_S = 15.0
"""Seconds until all runs are read, and SLURM has been asked."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=2.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = ManyRuns(Path(folder), options.runs, states=("running", "completed"))
        grower = multiprocessing.Process(target=grow, args=(made, options.every), daemon=True)
        grower.start()
        for columns, lines in ((80, 24), (200, 60)):
            asked, used = measure(made, columns, lines, options.seconds)
            share = 100 * used / options.seconds
            print(
                f"{columns}x{lines}: {share:.1f} % of a core over {options.seconds:g} s with {options.runs} runs, "
                f"{options.runs // 2} of them growing; squeue {asked} times  (goal: {GOAL:g} %)",
                flush=True,
            )
        grower.terminate()
        grower.join()


def measure(made: ManyRuns, columns: int, lines: int, seconds: float) -> tuple[int, float]:
    """Calls of squeue, and seconds of CPU time."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environ = {**made.environ(), "PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "hpctrain", "top", str(made.folder)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ, start_new_session=True)
    os.close(theirs)
    threading.Thread(target=drain, args=(ours,), daemon=True).start()
    time.sleep(SETTLE_S)
    asked, used = len(made.calls()), cpu_s(process.pid)
    time.sleep(seconds)
    asked, used = len(made.calls()) - asked, cpu_s(process.pid) - used
    os.write(ours, b"q")
    assert process.wait(20) == 0
    return asked, used


def grow(made: ManyRuns, every_s: float) -> None:
    growing = [run for run, state in zip(made.runs, made.states, strict=True) if state == "running"]
    step = STEPS // 2
    while True:
        began = time.monotonic()
        step += 10
        for run in growing:
            made.grow(run, step)
        time.sleep(max(0.0, every_s - (time.monotonic() - began)))


def drain(terminal: int) -> None:
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:  # the program has ended
        pass


def cpu_s(pid: int) -> float:
    """CPU time of a process and of the children that it has waited for: fields 14 to 17 of proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()

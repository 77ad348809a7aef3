"""Run a program that reports its steps, each of which takes as long as a file says: paced.py PACE PROGRAM ARGUMENTS."""

import runpy
import sys
import time
from pathlib import Path

from hpctrain import session

pace = Path(sys.argv[1])
report = session.step
slept_after = set()


def step(n, metrics=None):
    report(n, metrics)
    if n not in slept_after:  # a program may report a step twice, the second time with its metrics
        slept_after.add(n)
        time.sleep(float(pace.read_text()))


session.step = step
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")

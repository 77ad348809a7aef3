"""What the tests of the supervisor and of its parts share: SLURM's answers, steps for srun, and waiting."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.ledger import Ledger
from hpctrain.supervise.signals import watch_signals
from tests.unit.fakes import Step, exit_record

ABORTED = "srun: Job step aborted: Waiting up to 22 seconds for job step to finish.\n"
CAPTURED = (Path(__file__).parent / "attempt" / "captured" / "stops.txt").read_text()
STOPS = dict(re.findall(r"=== (\w+) [^\n]*\n(.*?)(?=\n=== |\Z)", CAPTURED, re.DOTALL))
"""What `scontrol show job` printed while a job was being stopped, by the cause."""
RUNNING = re.sub(r" EndTime=\d+", f" EndTime={int(time.time()) + 86_400}", STOPS["peer_died"])


def all_ranks(reason: str, step: int, **more: object) -> list[ExitRecord]:
    """The same exit record of both ranks."""
    return [exit_record(rank, reason, step, **more) for rank in range(2)]


def ends(reason: str, step: int, *, start: int = 0, **more: object) -> Step:
    """A step whose ranks all end in this way; what they trained is saved, unless they failed."""
    saves = (step,) if step > start and reason != "failed" else ()
    return Step(**{"start": start, "saves": saves, "exits": all_ranks(reason, step)} | more)


COMPLETES = ends("completed", 80)
KILLED = Step(start=0, saves=[10], stderr="srun: error: n2: task 1: Killed\n", exit_code=137)


def story(supervisor):
    """Of each attempt the first step, the reason of its end, the last step, and what follows."""
    found = Ledger(supervisor.directory).attempts()
    return [(one.start_step, str(one.reason), one.end_step, one.next) for one in found]


def send_sigterm(supervisor):
    """What SIGTERM does to the batch script; returns the thread that checks the job."""
    read_end, write_end = os.pipe()
    thread = watch_signals(read_end, supervisor.job.check)
    os.write(write_end, bytes([signal.SIGUSR1, signal.SIGTERM]))
    os.close(write_end)
    return thread


def in_a_thread(function):
    """Start a function; calling what is returned waits for it, and gives what it returned."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()

    def result():
        thread.join(120)
        return found[0]

    return result


def until(ready):
    """Wait until a function returns something true."""
    deadline = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)

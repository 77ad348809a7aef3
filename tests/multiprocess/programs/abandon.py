"""A rank that is killed while its loading processes are at work."""

import os
import signal
from pathlib import Path

from trial import Noisy, table

from hpctrain.data.loader import TrainLoader
from hpctrain.data.order import sequential
from hpctrain.data.plan import BatchPlan
from hpctrain.data.workers import Workers


def main(path):
    """Write the ids of the loading processes to a file, and die."""
    loader = TrainLoader(Noisy(*table(8)), sequential, BatchPlan(8, 4, 4, 1, True), rank=0, seed=0, workers=Workers(2))
    batches = iter(loader)
    next(batches)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    Path(path).write_text(children)
    os.kill(os.getpid(), signal.SIGKILL)

"""A rank that is killed while its loading processes are at work."""

import multiprocessing
import os
import signal
from pathlib import Path

from hpctrain.data.fetch import BatchFetcher
from hpctrain.data.loader import TrainLoader
from hpctrain.data.order import sequential
from hpctrain.data.plan import BatchPlan
from hpctrain.data.workers import Workers
from tests.multiprocess.programs.trial import Noisy, table


def main(path, start_method):
    """Write the ids of the loading processes to a file, and die."""
    multiprocessing.set_start_method(start_method, force=True)
    fetcher = BatchFetcher(Noisy(*table(8)), 0)
    loader = TrainLoader(fetcher, sequential, BatchPlan(8, 4, 4, 1, True), rank=0, workers=Workers(2))
    batches = iter(loader)
    next(batches)
    Path(path).write_text(" ".join(str(child.pid) for child in multiprocessing.active_children()))
    os.kill(os.getpid(), signal.SIGKILL)

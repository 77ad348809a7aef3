"""A user's task that takes its time where it may: SLOW_START and SLOW_EVAL are seconds, for all and for each batch.

COLLECTIVE_TIMEOUT is the timeout of the ranks' collectives in seconds.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.multiprocess.programs.trial import Trial


class Slow(Trial):
    """The trial, slower."""

    def prepare(self):
        time.sleep(float(os.environ.get("SLOW_START", "0")))
        if "COLLECTIVE_TIMEOUT" in os.environ:
            timeout = timedelta(seconds=float(os.environ["COLLECTIVE_TIMEOUT"]))
            set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
            set_timeout(timeout, dist.group.WORLD)

    def evaluate(self, model, batch):
        time.sleep(float(os.environ.get("SLOW_EVAL", "0")))
        return super().evaluate(model, batch)

"""A loop that asks `session.should_stop`, and leaves the group at once: one collective may be pending."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from hpctrain import session


def be_rank(steps, signalled, step_s, lag_s=0.0):
    """Join the other ranks, and return the answers of this one.

    Args:
        steps: calls, unless it stops.
        signalled: step by rank after which it gets SIGTERM; 0: never.
        step_s: seconds that a step takes, by rank.
        lag_s: seconds by which the last rank is late for its last call.
    """
    session.start()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    gradient = torch.ones(8)
    answers = []
    for step in range(1, steps + 1):
        time.sleep(step_s[rank])
        dist.all_reduce(gradient)
        if step == signalled[rank]:
            os.kill(os.getpid(), signal.SIGTERM)
        if step == steps and rank == world_size - 1:
            time.sleep(lag_s)
        answers.append(session.should_stop())
        if answers[-1]:
            break
    again = session.should_stop() if answers[-1] else None
    begin = time.monotonic()
    dist.destroy_process_group()
    return {"answers": answers, "again": again, "left_s": time.monotonic() - begin}

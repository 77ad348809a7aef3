"""What a training reads of a stream, step by step."""

from __future__ import annotations

import numpy as np

from hpctrain.data.bookmark import Bookmarks
from hpctrain.data.fetch import BatchFetcher
from hpctrain.data.loader import TrainLoader
from hpctrain.data.order import sequential
from hpctrain.data.workers import Workers


def read_steps(streams, plan, steps, marks=(), *, start_step=0, order=sequential, collate_fn=None, num_workers=0):
    """The numbers of each step, sorted over all ranks, and the bookmarks of all ranks after the last one.

    `streams` returns the stream of a rank.
    """
    found, kept = [[] for _ in range(steps)], Bookmarks()
    for rank in range(plan.world_size):
        own = Bookmarks(marks)
        fetcher = BatchFetcher(streams(), 0, collate_fn, bookmarks=own, step_samples=plan.global_batch_size)
        workers = Workers(num_workers)
        loader = TrainLoader(fetcher, order, plan, rank=rank, start_step=start_step, workers=workers)
        batches = iter(loader)
        for step in found:
            for _ in range(plan.accumulation):
                step.extend(np.asarray(next(batches).batch).tolist())
        batches.close()
        kept.add(own)
    return [sorted(step) for step in found], kept

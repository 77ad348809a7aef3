"""Which samples a rank works on, micro-batch after micro-batch, without end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from hpctrain.data.fetch import Request
from hpctrain.data.keyed import IntArray
from hpctrain.data.order import Order
from hpctrain.data.plan import BatchPlan
from hpctrain.errors import TaskError

_CHUNK_STEPS, _CHUNK_SAMPLES = 256, 16_384


class Assignment(NamedTuple):
    """One micro-batch of one rank before it is fetched; `MicroBatch` explains the last three."""

    request: Request
    num_samples: int
    divisor: float
    is_last: bool


def assign(plan: BatchPlan, order: Order, rank: int, start_step: int) -> Iterator[Assignment]:
    """This rank's micro-batches from a step on, across epochs, for ever.

    The order is asked for many steps at once, since asking has a fixed cost that a single step would feel; but for few
    at first, since a run begins, and resumes, with one.

    Raises:
        TaskError: the order returned another shape than that of the positions.
    """
    largest = max(1, min(_CHUNK_STEPS, _CHUNK_SAMPLES // (plan.accumulation * plan.micro_batch_size)))
    chunk = 1
    while True:
        steps = np.arange(start_step, start_step + chunk)
        starts, counts = plan.pieces(steps, rank)
        epochs = steps // plan.steps_per_epoch
        # An empty micro-batch gets a stand-in; its start may be one past the end, hence the bound.
        positions = np.minimum(starts[..., None] + np.arange(plan.micro_batch_size), plan.num_samples - 1)
        indices = _ordered(order, epochs[:, None, None], positions)
        lengths, epoch_numbers = counts.tolist(), epochs.tolist()
        for row in range(chunk):
            step = start_step + row
            last = plan.micro_batches(step) - 1
            for turn in range(last + 1):
                count = lengths[row][turn]
                request = epoch_numbers[row], indices[row, turn, : count or 1]
                yield Assignment(request, count, plan.divisor(step, count), turn == last)
        start_step += chunk
        chunk = min(2 * chunk, largest)


def _ordered(order: Order, epochs: IntArray, positions: IntArray) -> IntArray:
    indices = np.asarray(order(epochs, positions), dtype=np.int64)
    if indices.shape != positions.shape:
        raise TaskError(
            f"the order {type(order).__name__} returned shape {indices.shape} for positions of shape "
            f"{positions.shape}: expected one sample index per position"
        )
    return indices

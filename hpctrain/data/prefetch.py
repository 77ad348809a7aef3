"""Micro-batches on their way to a GPU while it computes."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import torch

from hpctrain.data.loader import MicroBatch
from hpctrain.data.tree import iterate_tensors


def prefetched(
    micro_batches: Generator[MicroBatch, None, None], move: Callable[[Any], Any], device: torch.device
) -> Generator[MicroBatch, None, None]:
    """The same micro-batches with their data on the device, copied while the GPU works on what came before.

    The copy runs in a stream of its own, which waits for nobody; the stream that computes waits for the copy, and the
    host, which is ahead of the GPU, for neither (where the data is in page-locked memory). On a CPU they are returned
    as they are.

    Args:
        micro_batches: of one rank; ended with the returned one.
        move: a batch to the device, without waiting; called once for each.
        device: of this rank.
    """
    return micro_batches if device.type != "cuda" else _beside(micro_batches, move, device)


def _beside(
    micro_batches: Generator[MicroBatch, None, None], move: Callable[[Any], Any], device: torch.device
) -> Generator[MicroBatch, None, None]:
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    with closing(micro_batches):
        for micro_batch in micro_batches:
            with torch.cuda.stream(copies):
                batch = move(micro_batch.batch)
            computing = torch.cuda.current_stream(device)
            computing.wait_stream(copies)
            for tensor in iterate_tensors(batch):
                if tensor.is_cuda:
                    # its memory is the other stream's: not to be given away before this one is done with it
                    tensor.record_stream(computing)
            yield micro_batch._replace(batch=batch, on_device=True)

"""Compare a few samples between ranks: datasets of equal length may differ, and a stream may split itself by rank."""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpctrain.data.bookmark import fresh_copy, loses_samples
from hpctrain.data.fetch import BatchFetcher, Collate, EpochFetcher
from hpctrain.data.micro_batch import iterate_tensors
from hpctrain.data.sharded_stream import streams_of
from hpctrain.data.shuffled_stream import ShuffledStream
from hpctrain.data.stream import is_stream
from hpctrain.data.workers import Workers, fetch_batches
from hpctrain.distributed.agreement import LoadingStop, StopWhileLoading
from hpctrain.distributed.determinism import random_states_restored
from hpctrain.distributed.stop_request import StopRequest
from hpctrain.distributed.world import World
from hpctrain.errors import TaskError
from hpctrain.phrases import numbered
from hpctrain.train.rank_comparison import SAME_DATA, SAME_STREAM

MAX_S = 2.0
"""Seconds of reading after which a rank compares only what it has read so far."""
NUM_NUMBERS = 128
"""How many numbers of a sample are compared."""
NUM_PICKED = 30
"""How many of them are elements of one tensor."""
NUM_AVERAGED = 4096
"""Most elements of a tensor of which the mean is compared."""
TOLERANCE = 0.02
"""Share of a tensor's largest number by which images and floating-point numbers may differ: different processors
decode and compute with different last digits."""
NUM_OF_STREAM = 3
"""How many samples of a stream are compared."""
REPEATS = 10
"""How often a rank reads a differing sample again, to find out whether it is random."""

UNREAD = torch.stack([torch.full((NUM_NUMBERS,), torch.inf, dtype=torch.float64)] * 2)
_PROCESS_DEPENDENT = re.compile(r"[^\s'\"]*/|\b0x[0-9a-fA-F]+")
"""Folders, since nodes may have copies of the data in different ones, and addresses of objects."""
_WORD = re.compile(r"[^\s,(){}\[\]]+")


class SampleCheck:
    """Compares the first, the middle and the last sample of a dataset between ranks; of a stream, the first three.

    Of a `ShardedStream` it reads only the first stream, since no rank reads them all; of a `ShuffledStream`, the stream
    inside, without filling the window. It skips a Hugging Face stream with a shuffle buffer.

    Args:
        dataset: of the task.
        world: the ranks.
        seed: of the samples' random draws.
        collate_fn: as the loader gets it.
        workers: as the loader gets them. If there are any, one of them reads the samples: what a dataset opens when it
            is first read, such as a file, must not be open already when workers are forked.
        stop: after a request to stop, this rank compares only what it has read so far; None for no stop.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        world: World,
        *,
        seed: int,
        collate_fn: Collate | None,
        workers: Workers,
        stop: StopRequest | None = None,
    ) -> None:
        self._loading = None if stop is None else LoadingStop(stop)
        self._dataset = dataset
        self._world = world
        self._seed = seed
        self._collate = collate_fn
        self._workers = replace(workers, num_workers=min(1, workers.num_workers), pin_memory=False)

    def __call__(self, kind: str) -> None:
        """Read and compare the samples; collective. Global random states are as before.

        A sample that a rank can't read isn't compared, nor is one that differs when a rank reads it again, because the
        dataset draws from its own random generator.

        Args:
            kind: `training` or `held-out`, for the message.

        Raises:
            TaskError: on every rank; names the sample, and the ranks that differ from the first one that has read it.
        """
        if self._world.control is None:
            return
        last = NUM_OF_STREAM - 1 if is_stream(self._dataset) else max(0, len(self._dataset) - 1)  # type: ignore[arg-type]  # Dataset declares no __len__
        indices = [0, last // 2, last]
        samples = torch.stack(self._read(indices))
        differing = self._differs(samples).nonzero().flatten().tolist()
        if not differing:
            return
        index, sample = indices[differing[0]], samples[differing[0]]
        varies = any(_differ(sample, *self._read([index])) for _ in range(REPEATS))
        if self._world.combine_(torch.tensor([int(varies)]), "max").item():
            return
        gathered = self._world.gather(None if sample.isinf().any() else sample.tolist())
        message = None
        if gathered is not None:
            remedy = SAME_STREAM if is_stream(self._dataset) else SAME_DATA
            message = f"{_who_differs(gathered)} in the content of {kind} sample {index}; {remedy}"
        raise TaskError(self._world.broadcast(message))

    def _differs(self, samples: Tensor) -> Tensor:
        """Return, for each sample, whether two ranks have read different numbers; collective.

        Args:
            samples: of shape [n, 2, NUM_NUMBERS].
        """
        numbers, tolerances = samples.unbind(1)
        # one reduction: minimum, negative maximum, and negative maximum of the tolerances. What a rank hasn't read is
        # infinite in all three, and leaves the others as they are
        extremes = torch.stack([numbers, torch.where(numbers.isinf(), numbers, -numbers), -tolerances])
        extremes[2][tolerances.isinf()] = torch.inf
        low, negative_high, negative_tolerance = self._world.combine_(extremes, "min")
        differs: Tensor = (-negative_high - low > -negative_tolerance).any(1)
        return differs

    def _read(self, indices: Sequence[int]) -> list[Tensor]:
        """Read samples, each in a batch of its own; `UNREAD` for what can't be read, or not in time."""
        samples: list[Tensor] = []
        begin = time.monotonic()
        # an error of the dataset is raised where training reads the sample, if it does
        with random_states_restored(self._world.gpus), suppress(Exception, StopWhileLoading):
            requests = [(0, np.array([index])) for index in indices]
            for batch in fetch_batches(self._fetcher(), requests, self._workers, self._loading):
                samples.append(_numbers_of(batch))
                if time.monotonic() - begin > MAX_S:
                    break
        return samples + [UNREAD] * (len(indices) - len(samples))

    def _fetcher(self) -> BatchFetcher:
        """Make a fetcher that leaves the dataset's own position unchanged."""
        if not is_stream(self._dataset):
            return BatchFetcher(self._dataset, self._seed, self._collate)
        stream = streams_of(self._dataset)[0]
        while isinstance(stream, ShuffledStream):
            stream = stream._stream
        if loses_samples(stream):
            raise TaskError("its buffer would have to be filled first")
        return EpochFetcher(fresh_copy(stream), self._collate)


def _numbers_of(batch: Any) -> Tensor:
    """Return the numbers of a batch to compare, and their tolerances, of shape [2, NUM_NUMBERS]."""
    numbers: list[float] = []
    tolerances: list[float] = []
    for tensor in iterate_tensors(batch):
        elements = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().flatten()
        chosen = elements[_spread(len(elements), NUM_AVERAGED)].double().nan_to_num()
        picked = chosen[_spread(len(chosen), NUM_PICKED)]
        numbers += [len(elements), *picked.tolist(), *([chosen.mean().item()] if len(chosen) else [])]
        is_exact = not elements.is_floating_point() and elements.dtype is not torch.uint8
        tolerance = 0.0 if is_exact or not len(chosen) else TOLERANCE * chosen.abs().max().item()
        tolerances += [0.0, *[tolerance] * (len(numbers) - len(tolerances) - 1)]
    if not numbers:
        # sorted: each process has an order of its own for a set of texts
        words = sorted(_WORD.findall(_PROCESS_DEPENDENT.sub("", repr(batch))))
        numbers, tolerances = [zlib.crc32(" ".join(words).encode())], [0.0]
    padding = [0.0] * NUM_NUMBERS
    return torch.tensor([(numbers + padding)[:NUM_NUMBERS], (tolerances + padding)[:NUM_NUMBERS]], dtype=torch.float64)


def _spread(length: int, max_count: int) -> Tensor:
    return torch.linspace(0, length - 1, min(length, max_count), dtype=torch.float64).long()


def _differ(left: Tensor, right: Tensor) -> bool:
    """Whether two results of `_numbers_of` differ by more than their tolerances."""
    return bool(((left[0] - right[0]).abs() > torch.maximum(left[1], right[1])).any())


def _who_differs(gathered: list[Any]) -> str:
    samples = {rank: torch.tensor(sample) for rank, sample in enumerate(gathered) if sample is not None}
    first = min(samples)
    ranks = [rank for rank, sample in samples.items() if _differ(samples[first], sample)]
    return f"{numbered('rank', ranks)} {'differs' if len(ranks) == 1 else 'differ'} from rank {first}"

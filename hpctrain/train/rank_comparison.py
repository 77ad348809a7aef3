"""Compare what the ranks have built: a difference is then an error at the start, not a hang or a wrong result."""

from __future__ import annotations

import hashlib
import json
import re
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset

from hpctrain.data.bookmark import fresh_copy, loses_samples
from hpctrain.data.fetch import BatchFetcher, Collate, EpochFetcher, dataset_length, fetch_batches
from hpctrain.data.micro_batch import iterate_tensors
from hpctrain.data.stream import ShuffledStream, is_stream, streams_of
from hpctrain.data.workers import Workers
from hpctrain.errors import TaskError
from hpctrain.phrases import numbered
from hpctrain.rank.agreement import LoadingStop, StopWhileLoading
from hpctrain.rank.determinism import random_states_restored
from hpctrain.rank.stop_request import StopRequest
from hpctrain.rank.world import World

SAME_DATA = "every rank must build the same dataset: sort lists of files, and don't split samples by rank"
SAME_STREAM = "every rank must read the same stream, which hpctrain divides among the ranks: don't split it by rank"
SAME_ORDER = "Task.order must be a function of the number of samples and the seed"
SAME_MODEL = "every rank must build the same model"
SAME_CONFIGURATION = "start every rank with the same configuration"


class RankComparison:
    """Facts about what this rank has built, to be compared with those of the other ranks.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._facts: list[list[str]] = []

    def add(self, name: str, description: object, remedy: str) -> None:
        """Add a fact.

        Args:
            name: a noun phrase: `the number of training samples`.
            description: its value on this rank, whose text is compared.
            remedy: what to do if it differs between ranks.
        """
        self._facts.append([name, str(description), remedy])

    def add_dataset(self, kind: str, dataset: Any) -> None:
        """Add the length of a dataset; its class may differ, as where one rank of a node fills a cache.

        Args:
            kind: `training` or `held-out`.
            dataset: None if there is none.
        """
        described = "none" if dataset is None else "a stream" if is_stream(dataset) else "a dataset with indices"
        self.add(f"the {kind} data", described, SAME_DATA)
        if dataset is None:
            return
        try:
            length = dataset_length(dataset)
        except TaskError:  # refused later, on every rank
            return
        self.add(f"the number of {kind} samples", "unknown" if length is None else f"{length:,}", SAME_DATA)
        self.add(f"the number of streams of the {kind} data", len(streams_of(dataset)), SAME_DATA)

    def add_model(self, model: nn.Module, remedy: str = SAME_MODEL) -> None:
        """Add the names, shapes and types of a model's parameters and buffers; all ranks get rank zero's values later.

        Args:
            model: whole, before it is sharded or wrapped.
            remedy: what to do if it differs between ranks.
        """
        # DDP leaves these to each rank
        ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
        for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in tensors:
                if name not in ignored:
                    self.add(f"the {kind} {name}", describe_tensor(tensor), remedy)

    def require_same(self) -> None:
        """Compare the facts added since the last call with those of the other ranks; collective.

        Equal facts cost one reduction of 64 bytes. Only if they differ do the ranks get rank zero's.

        Raises:
            TaskError: on every rank; names the ranks that differ from rank zero, and the first difference.
        """
        facts, self._facts = self._facts, []
        if self._world.control is None:
            return
        digest = hashlib.sha256(json.dumps(facts).encode()).digest()
        words = torch.frombuffer(bytearray(digest), dtype=torch.int64)
        # the minimum of inverted bits is the inverted maximum
        lowest, inverted_highest = self._world.combine_(torch.cat([words, ~words]), "min").chunk(2)
        if torch.equal(lowest, ~inverted_highest):
            return
        difference = _difference(facts, self._world.broadcast(facts))
        raise TaskError(self._world.decide_on_rank_zero(difference, _message))


def require_same_model(model: nn.Module, world: World, remedy: str = SAME_MODEL) -> None:
    """Refuse ranks that have built different models; collective.

    Args:
        model: whole, before it is sharded or wrapped.
        world: the ranks.
        remedy: what to do if they differ.

    Raises:
        TaskError: on every rank; names the ranks that differ from rank zero, and the first difference.
    """
    comparison = RankComparison(world)
    comparison.add_model(model, remedy)
    comparison.require_same()


def describe_tensor(tensor: Tensor) -> str:
    """Describe the shape and type of a tensor, as ranks compare them."""
    if is_lazy(tensor):
        return "without a shape"
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}{', frozen' * frozen}"


def _difference(facts: list[list[str]], expected: list[list[str]]) -> list[str] | None:
    """The first difference from rank zero's facts, and its remedy; None without one."""
    for fact, reference in zip(facts, expected, strict=False):
        if fact == reference:
            continue
        if fact[0] == reference[0]:
            return [f"in {fact[0]}: {{has}} {fact[1]}, rank 0 has {reference[1]}", fact[2]]
        if reference[0] not in {name for name, _, _ in facts}:
            return [f"in {reference[0]}, which only rank 0 has", reference[2]]
        if fact[0] not in {name for name, _, _ in expected}:
            return [f"in {fact[0]}, which rank 0 doesn't have", fact[2]]
        return [f"in the order: {{has}} {fact[0]} in the place of {reference[0]}", fact[2]]
    if len(facts) == len(expected):
        return None
    longer, which = (facts, "rank 0 doesn't have") if len(facts) > len(expected) else (expected, "only rank 0 has")
    name, _, remedy = longer[min(len(facts), len(expected))]
    return [f"in {name}, which {which}", remedy]


def _message(differences: list[list[str] | None]) -> str:
    """Describe the first difference, and all ranks that have it."""
    first = next(filter(None, differences))
    difference, remedy = first
    ranks = [rank for rank, reported in enumerate(differences) if reported == first]
    alone = len(ranks) == 1
    place = difference.replace("{has}", "it has" if alone else "they have")
    return f"{numbered('rank', ranks)} {'differs' if alone else 'differ'} from rank 0 {place}; {remedy}"


MAX_S = 2.0
"""Seconds of reading after which a rank compares only what it has read so far."""
NUM_NUMBERS = 128
"""Numbers per sample that are compared."""
NUM_PICKED = 30
"""Most of these numbers that are elements of one tensor."""
NUM_AVERAGED = 4096
"""Most elements of a tensor over which the compared mean is taken."""
TOLERANCE = 0.02
"""Share of a tensor's largest number by which images and floating-point numbers may differ: different processors
decode and compute with different last digits."""
NUM_OF_STREAM = 3
"""Samples per stream that are compared."""
REPEATS = 10
"""Times that a rank reads a differing sample again, to find out whether it is random."""

UNREAD = torch.stack([torch.full((NUM_NUMBERS,), torch.inf, dtype=torch.float64)] * 2)
_PROCESS_DEPENDENT = re.compile(r"[^\s'\"]*/|\b0x[0-9a-fA-F]+")
"""Folders, since nodes may have copies of the data in different ones, and addresses of objects."""
_WORD = re.compile(r"[^\s,(){}\[\]]+")


@dataclass(eq=False)
class SampleCheck:
    """Compares the first, the middle and the last sample of a dataset between ranks; of a stream, the first three.

    Of a `ShardedStream` it reads only the first stream, since no rank reads them all; of a `ShuffledStream`, the stream
    inside, without filling the window. It skips a Hugging Face stream with a shuffle buffer.

    Attributes:
        dataset: of the task.
        world: the ranks.
        seed: of the samples' random draws.
        collate_fn: as the loader gets it.
        workers: as the loader gets them. If there are any, one of them reads the samples: what a dataset opens when it
            is first read, such as a file, must not be open already when workers are forked.
        stop: after a request to stop, this rank compares only what it has read so far; None for no stop.
    """

    dataset: Dataset[Any]
    world: World
    _: KW_ONLY
    seed: int
    collate_fn: Collate | None
    workers: Workers
    stop: StopRequest | None = None

    def __call__(self, kind: str) -> None:
        """Read and compare the samples; collective. Global random states are as before.

        A sample that a rank can't read isn't compared, nor is one that differs when a rank reads it again, because the
        dataset draws from its own random generator.

        Args:
            kind: `training` or `held-out`, for the message.

        Raises:
            TaskError: on every rank; names the sample, and the ranks that differ from the first one that has read it.
        """
        if self.world.control is None:
            return
        last = NUM_OF_STREAM - 1 if is_stream(self.dataset) else max(0, len(self.dataset) - 1)  # type: ignore[arg-type]  # Dataset declares no __len__
        indices = [0, last // 2, last]
        samples = torch.stack(self._read(indices))
        differing = self._differ_between_ranks(samples).nonzero().flatten().tolist()
        if not differing:
            return
        index, sample = indices[differing[0]], samples[differing[0]]
        varies = any(_differ(sample, *self._read([index])) for _ in range(REPEATS))
        if self.world.combine_(torch.tensor([int(varies)]), "max").item():
            return
        numbers = None if sample.isinf().any() else sample.tolist()
        differing_ranks = self.world.decide_on_rank_zero(numbers, _describe_differing_ranks)
        remedy = SAME_STREAM if is_stream(self.dataset) else SAME_DATA
        raise TaskError(f"{differing_ranks} in the content of {kind} sample {index}; {remedy}")

    def _differ_between_ranks(self, samples: Tensor) -> Tensor:
        """Return, for each sample, whether two ranks have read different numbers; collective.

        Args:
            samples: of shape [n, 2, NUM_NUMBERS].
        """
        numbers, tolerances = samples.unbind(1)
        # one reduction: minimum, negative maximum, and negative maximum of the tolerances. What a rank hasn't read is
        # infinite in all three, and leaves the others as they are
        extremes = torch.stack([numbers, torch.where(numbers.isinf(), numbers, -numbers), -tolerances])
        extremes[2][tolerances.isinf()] = torch.inf
        low, negative_high, negative_tolerance = self.world.combine_(extremes, "min")
        differs: Tensor = (-negative_high - low > -negative_tolerance).any(1)
        return differs

    def _read(self, indices: Sequence[int]) -> list[Tensor]:
        """Read samples, each in a batch of its own; `UNREAD` for what can't be read, or not in time."""
        samples: list[Tensor] = []
        begin = time.monotonic()
        workers = replace(self.workers, num_workers=min(1, self.workers.num_workers), pin_memory=False)
        loading = None if self.stop is None else LoadingStop(self.stop)
        # an error of the dataset is raised where training reads the sample, if it does
        with random_states_restored(self.world.gpus), suppress(Exception, StopWhileLoading):
            requests = [(0, np.array([index])) for index in indices]
            for batch in fetch_batches(self._fetcher(), requests, workers, loading):
                samples.append(_fingerprint(batch))
                if time.monotonic() - begin > MAX_S:
                    break
        return samples + [UNREAD] * (len(indices) - len(samples))

    def _fetcher(self) -> BatchFetcher:
        """Make a fetcher that leaves the dataset's own position unchanged."""
        if not is_stream(self.dataset):
            return BatchFetcher(self.dataset, self.seed, self.collate_fn)
        stream = streams_of(self.dataset)[0]
        while isinstance(stream, ShuffledStream):
            stream = stream._stream
        if loses_samples(stream):
            raise TaskError("its buffer would have to be filled first")
        return EpochFetcher(fresh_copy(stream), self.collate_fn)


def _fingerprint(batch: Any) -> Tensor:
    """Return the numbers of a batch to compare, and their tolerances, of shape [2, NUM_NUMBERS]."""
    numbers: list[float] = []
    tolerances: list[float] = []
    for tensor in iterate_tensors(batch):
        elements = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().flatten()
        chosen = elements[_spread_indices(len(elements), NUM_AVERAGED)].double().nan_to_num()
        picked = chosen[_spread_indices(len(chosen), NUM_PICKED)]
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


def _spread_indices(length: int, max_count: int) -> Tensor:
    return torch.linspace(0, length - 1, min(length, max_count), dtype=torch.float64).long()


def _differ(first: Tensor, second: Tensor) -> bool:
    """Whether two results of `_fingerprint` differ by more than their tolerances."""
    return bool(((first[0] - second[0]).abs() > torch.maximum(first[1], second[1])).any())


def _describe_differing_ranks(gathered: list[Any]) -> str:
    samples = {rank: torch.tensor(sample) for rank, sample in enumerate(gathered) if sample is not None}
    first = min(samples)
    ranks = [rank for rank, sample in samples.items() if _differ(samples[first], sample)]
    return f"{numbered('rank', ranks)} {'differs' if len(ranks) == 1 else 'differ'} from rank {first}"

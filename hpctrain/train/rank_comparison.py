"""Compare what the ranks have built, so that a difference is an error at the start, not a hang or a wrong result."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hpctrain.data.fetch import dataset_length
from hpctrain.data.sharded_stream import streams_of
from hpctrain.data.stream import is_stream
from hpctrain.distributed.world import World
from hpctrain.errors import TaskError
from hpctrain.phrases import numbered
from hpctrain.train.metric_states import states_of

SAME_DATA = "every rank must build the same dataset: sort lists of files, and don't split samples by rank"
SAME_STREAM = "every rank must read the same stream, which hpctrain divides among the ranks: don't split it by rank"
SAME_ORDER = "Task.order must be a function of the number of samples and the seed"
SAME_MODEL = "every rank must build the same model"
SAME_METRICS = "Task.build_metrics must return the same metrics on every rank"
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
                    self.add(f"the {kind} {name}", _described(tensor), remedy)

    def add_metrics(self, metrics: dict[str, Any]) -> None:
        """Add metric objects and their states, before the first update.

        Args:
            metrics: by name.
        """
        for name, metric in metrics.items():
            self.add(f"the metric {name}", type(metric).__qualname__, SAME_METRICS)
            for state in states_of(metric):
                default = "a list" if state.default is None else _described(state.default)
                self.add(f"the metric {name}: {state.name}", default, SAME_METRICS)

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
        gathered = self._world.gather(difference)
        raise TaskError(self._world.broadcast(None if gathered is None else _message(gathered)))


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


def _described(tensor: Tensor) -> str:
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

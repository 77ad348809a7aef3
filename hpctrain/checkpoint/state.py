"""The contents of a checkpoint: a copy of the state in host memory, under plain names, and the weights' digest."""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hpctrain.checkpoint.host_memory import HostCopy, element_bytes, sharing_key
from hpctrain.checkpoint.page_locked import PageLockedMemory
from hpctrain.run.evaluation import Score

NAMED = "named"
"""Key of the states of several optimizers; a single one's state dict has no such key."""


class Stateful(Protocol):
    """A part of the training whose state is in checkpoints; like `torch.distributed.checkpoint.stateful.Stateful`.

    Attributes:
        is_collective: whether `state` is collective. Then every rank calls it in each save; otherwise only the ranks
            that write do.
    """

    is_collective: ClassVar[bool] = False

    def state(self) -> dict[str, Any]:
        """Return the state by its keys in checkpoints, without copying tensors; no other part has these keys."""

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Restore the state; not collective.

        Args:
            saved: all states of a checkpoint, by key (`LoadedCheckpoint.states`). A checkpoint of an earlier version
                may lack the keys of this part: then its state starts afresh.

        Raises:
            CheckpointError: the state belongs to another training.
        """


def states_of(parts: Iterable[Stateful], *, collective: bool) -> dict[str, Any]:
    """Return the states of the parts that are collective, or of those that aren't, in their order.

    Args:
        parts: in the same order on every rank.
        collective: which of them; if true, this call is collective, too.
    """
    return {key: value for part in parts if part.is_collective is collective for key, value in part.state().items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All state that determines the rest of a run between two steps, in host memory or mapped from a checkpoint.

    Attributes:
        model: plain name -> tensor, tied weights still tied; extra state of modules as the modules returned it.
        optimizer: its state dict; of several, ``named`` with the state dict of each by name.
        state: the fields of `Head`, ``scaler``, ``parameters`` (names of the optimizer's parameters, by group),
            ``rng``, ``extra``; of several optimizers or scalers, the first two are by name.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Completed steps."""
        return int(self.state["step"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The position of the run: the fields that a reader of a checkpoint needs first.

    Attributes:
        step: completed steps.
        samples_seen: over all ranks, since the start of the run.
        world_size: of this attempt.
        config_digest: of the run's configuration.
        score: of the evaluation of this step.
    """

    step: int
    samples_seen: int
    world_size: int
    config_digest: str
    score: Score | None = None


class PlainNames:
    """Removes the ``module.`` of DDP and the ``_orig_mod.`` of torch.compile from names, wherever in the tree they are.

    A module that a task itself called ``module`` keeps its name.

    Args:
        model: its tree of modules is read once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._wrapped: set[str] = set()
        for path, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, DistributedDataParallel | DataParallel):
                self._wrapped.add(f"{path}.module".lstrip("."))
            elif "_orig_mod" in module._modules:
                self._wrapped.add(f"{path}._orig_mod".lstrip("."))

    def __call__(self, name: str) -> str:
        """Return the plain form of the name of a module, parameter or buffer of the model."""
        if not self._wrapped:
            return name
        parts = name.split(".")
        return ".".join(part for i, part in enumerate(parts) if ".".join(parts[: i + 1]) not in self._wrapped)


def parameter_names(names: Mapping[int, str], optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the plain names of an optimizer's parameters, by group; a parameter outside of the model has the name ''.

    An optimizer's state dict identifies its parameters by their positions alone.

    Args:
        names: `names_by_id` of the model.
        optimizer: whose parameters are named.
    """
    return [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]


def names_by_id(model: nn.Module) -> dict[int, str]:
    """Return the plain name of each parameter by its `id`; for a tied parameter, its first name."""
    plain = PlainNames(model)
    return {id(parameter): plain(name) for name, parameter in model.named_parameters()}


CHANGED_BUFFERS = "changed_buffers"
"""Key of the names of buffers that training had changed in shape or dtype, added or removed; absent without any."""
BufferKinds: TypeAlias = dict[str, tuple[torch.Size, torch.dtype]]
"""Shape and dtype of buffers, by plain name."""


def buffer_kinds(model: nn.Module) -> BufferKinds:
    """Return the shape and dtype of each buffer that checkpoints hold, by its plain name."""
    plain = PlainNames(model)
    return {
        plain(f"{path}.{name}".lstrip(".")): (buffer.shape, buffer.dtype)
        for path, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def changed_buffers(before: BufferKinds, after: BufferKinds) -> list[str]:
    """Return the names of buffers that differ in shape or dtype, or that only one of both has."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


@dataclass(frozen=True)
class LiveState:
    """The state of training between two steps, as a checkpoint stores it.

    Attributes:
        model: with or without wrappers; its names are saved plain.
        optimizers: over parameters of the model, by name; the name of a single one is ''.
        head: the position of the run.
        scalers: of fp16, by name; the name of a single one is ''. A disabled one is saved as None.
        rng: `rng_state` of every rank, in rank order.
        extra: all other state that determines the rest of the run: tensors, numbers, strings, dicts, lists, tuples.
    """

    model: nn.Module
    optimizers: Mapping[str, torch.optim.Optimizer]
    _: KW_ONLY
    head: Head
    scalers: Mapping[str, torch.amp.GradScaler] = field(default_factory=dict)
    rng: Sequence[object] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def missing_bytes(self, page_locked: PageLockedMemory) -> int:
        """Return the host memory that a copy still needs, beyond what is page-locked already; nothing is copied.

        Args:
            page_locked: memory for the copies from a GPU.
        """
        on_host = sum(tensor.nbytes for tensor in self._tensors() if not page_locked.serves(tensor))
        return on_host + page_locked.missing_bytes(self.page_locked_sizes(page_locked))

    def page_locked_sizes(self, page_locked: PageLockedMemory) -> list[int]:
        """Return the bytes of each tensor whose copy is in page-locked memory; tied weights count once.

        Args:
            page_locked: memory for the copies from a GPU.
        """
        distinct = {sharing_key(tensor): tensor.nbytes for tensor in self._tensors() if page_locked.serves(tensor)}
        return [count for count in distinct.values() if count]

    def capture(
        self, into: Snapshot | None = None, *, copied: bool = True, page_locked: PageLockedMemory | None = None
    ) -> Snapshot:
        """Copy the contents of a checkpoint, and return when training may continue; not collective.

        Args:
            into: an earlier snapshot that is no longer in use: its buffers are overwritten, which makes the copy
                several times faster than into fresh memory.
            copied: whether to copy tensors in host memory; if not, training must wait until they are written.
            page_locked: memory for the copies from a GPU; None for ordinary memory.

        Raises:
            CheckpointError: a value can't be stored in a checkpoint; the message names its place.
        """
        copy = HostCopy(everything=copied, page_locked=page_locked)
        snapshot = self._snapshot(copy, into or Snapshot(model={}, optimizer={}, state={}))
        copy.finish()
        return snapshot

    def _snapshot(self, copy: HostCopy, buffers: Snapshot) -> Snapshot:
        return Snapshot(
            model=_named_tensors(self.model, copy, buffers.model),
            optimizer=copy.of(self._optimizer_state(), buffers.optimizer, "optimizer"),
            state=copy.of(self._other_state(), buffers.state, "state"),
        )

    def _tensors(self) -> Iterator[Tensor]:
        return tensors_in((self.model.state_dict(), self._optimizer_state(), self.extra))

    def _optimizer_state(self) -> dict[str, Any]:
        states = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        return states.get("", {NAMED: states})

    @cached_property
    def _names(self) -> dict[int, str]:
        # training waits while they are looked up, so once for each save
        return names_by_id(self.model)

    def _other_state(self) -> dict[str, Any]:
        names = {name: parameter_names(self._names, optimizer) for name, optimizer in self.optimizers.items()}
        scales = {name: scaler.state_dict() or None for name, scaler in self.scalers.items()}
        return {
            **asdict(self.head),
            # of a single optimizer or scaler, without a name
            "scaler": scales.get("", scales or None),
            "parameters": names.get("", names),
            "rng": list(self.rng),
            "extra": dict(self.extra),
        }


def weights_digest(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of named tensors in hexadecimal; the same on every machine, device and world size.

    For each name in sorted order: the name in UTF-8, NUL, the dtype ("float32"), NUL, the sizes joined by commas, NUL,
    the elements in row-major order as little-endian bytes. Other values (a module's extra state) are skipped.

    Args:
        state: plain name -> tensor of any dense dtype, on any device.
    """
    # the elements' bytes are taken from memory as they are
    assert sys.byteorder == "little"
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        if isinstance(tensor, Tensor):
            sizes = ",".join(map(str, tensor.shape))
            digest.update(f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{sizes}\0".encode())
            digest.update(element_bytes(tensor.detach().cpu()).numpy().data)
    return digest.hexdigest()


def _named_tensors(model: nn.Module, copy: HostCopy, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    plain = PlainNames(model)
    saved = model.state_dict()
    tensors: OrderedDict[str, Tensor] = OrderedDict()
    for name, value in saved.items():
        key = plain(name)
        tensors[key] = copy.of(value, buffers.get(key), f"model[{key!r}]")
    # torch keeps the modules' versions here, by which they recognize a state of an earlier version of themselves
    if (versions := getattr(saved, "_metadata", None)) is not None:
        tensors._metadata = {plain(path): dict(entry) for path, entry in versions.items()}  # type: ignore[attr-defined]
    return tensors


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the dense tensors of a tree; `HostCopy` refuses any other kind."""
    return (tensor for _, tensor in placed_tensors(value) if tensor.layout == torch.strided)


def placed_tensors(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield the tensors of a tree, each with its place: the keys and indices that lead to it."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping | list | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from placed_tensors(item, (*path, str(key)))

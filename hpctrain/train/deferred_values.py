"""Build a model without its weights, and give each rank the values of its shards, as if it had been built whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from hpctrain.checkpoint.restore import copy_saved
from hpctrain.checkpoint.rng import restore_rng, rng_state
from hpctrain.errors import TaskError
from hpctrain.train.deferred_build import deferred
from hpctrain.train.deferred_record import Record
from hpctrain.train.deferred_tape import DeferredBuildError, Source

log = logging.getLogger("hpctrain.train")


class DeferredValues:
    """The values that the tensors of a model would have had, one after the other.

    Args:
        record: of the model's building.
        sources: where each value comes from, by the name of the parameter or buffer.
    """

    def __init__(self, record: Record, sources: Mapping[str, Source]) -> None:
        self._record = record
        self._sources = sources
        self._missing: dict[str, Tensor] = {}

    def fill(
        self,
        root: nn.Module,
        model: nn.Module,
        device: torch.device,
        *,
        of_buffers: torch.device,
        leave_saved: bool = False,
    ) -> None:
        """Give a sharded model memory and values; of each tensor, at most the whole one is in memory besides.

        Args:
            root: the module around the model that was sharded.
            model: as it was recorded, with shards on `meta` in the place of its parameters.
            device: of this rank's shards.
            of_buffers: their device.
            leave_saved: leave what the model's state dict contains without values, until a checkpoint or `fill_rest`
                provides them.

        Raises:
            TaskError: an operation gave another result than torch's meta device promised.
        """
        before = _named(model)
        root.to_empty(device=device)
        if of_buffers != device:
            _move_buffers(model, of_buffers)
        after = _share_again(model, before)
        # only the tensors themselves: a hook may save something else in their place
        saved = {id(value) for value in model.state_dict(keep_vars=True).values()} if leave_saved else set()
        self._missing = {name: target for name, target in after.items() if id(target) in saved}
        self._compute({name: target for name, target in after.items() if name not in self._missing})

    def fill_rest(self) -> None:
        """Compute the values that `fill` has left out, if any.

        Raises:
            TaskError: as for `fill`.
        """
        self._compute(self._missing)
        self._missing = {}

    def _compute(self, targets: Mapping[str, Tensor]) -> None:
        filled: set[int] = set()
        for names in self._record.in_groups({name: self._sources[name] for name in targets}):
            for name in names:
                if id(target := targets[name]) not in filled:
                    copy_saved(target.detach(), self._value(name))
                    filled.add(id(target))
        self._record.forget()

    def _value(self, name: str) -> Tensor:
        try:
            return self._record.values(self._sources[name])
        except DeferredBuildError as error:
            raise TaskError(
                f"the initial values of {name} can't be computed apart from the model ({error}): initialise it with "
                "torch.nn.init in the model's constructor, or use parallel=ddp"
            ) from error


def deferred_values(build: Callable[[], nn.Module]) -> tuple[nn.Module, DeferredValues | None]:
    """Build a model on `meta`, and record how its values come about.

    Args:
        build: builds the model; it is called a second time if its values can't be recorded.

    Returns:
        The model and its values; None if the model has its values already, because they couldn't be recorded.
    """
    before = rng_state(())
    try:
        with deferred() as record:
            model = build()
        return model, DeferredValues(record, record.sources(model))
    except DeferredBuildError as error:
        log.warning("every rank builds the whole model before it is sharded: %s", error)
    restore_rng(before, ())
    return build(), None


def _named(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Give buffers memory on another device."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def _share_again(model: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Restore what modules shared before `to_empty`, which gives each of them a tensor of its own; return all."""
    found = _named(model)
    first: dict[int, str] = {}
    for name, tensor in before.items():
        if (shared := first.setdefault(id(tensor), name)) != name:
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, found[shared])
            found[name] = found[shared]
    return found

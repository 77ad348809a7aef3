"""The initial values of a model that the ranks of a mesh share: rank zero builds them, and sends them to the others."""

from __future__ import annotations

import gc
import logging
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.checkpoint.restore import copy_saved
from hpctrain.checkpoint.rng import restore_rng, rng_state
from hpctrain.distributed.world import World

InitialValues: TypeAlias = dict[tuple[str, ...], Tensor]
"""The parameters, then the buffers, by all names of each; on `meta` on the ranks that don't have the values."""

log = logging.getLogger("hpctrain.train")


def build_on_rank_zero(build: Callable[[], nn.Module], world: World) -> tuple[nn.Module, InitialValues]:
    """Build a model whose values only rank zero has, as if it were the only rank; collective.

    Afterwards, all ranks have rank zero's random state.

    Args:
        build: builds the model; other ranks call it inside of ``torch.device("meta")``.
        world: the ranks.

    Returns:
        The model on `meta`, and the values for `send_values`.
    """
    if world.is_rank_zero:
        model = build()
        values = {names: tensor.detach() for names, tensor in _by_names(model).items()}
        _forget_values(model)
    else:
        model = build_without_values(build, world.gpus)
        values = _by_names(model)
    # on meta, nothing is drawn
    restore_rng(world.broadcast(rng_state(world.gpus)), world.gpus)
    return model, values


def build_without_values(build: Callable[[], nn.Module], gpus: Sequence[torch.device] = ()) -> nn.Module:
    """Build a model on `meta`, without memory; all that isn't a parameter or a buffer is as in an ordinary build.

    If that doesn't work on `meta`, the model is built on the CPU and loses its values afterwards.

    Args:
        build: builds the model; it is called a second time if it can't be built on `meta`.
        gpus: of this rank.
    """
    random_state, earlier = rng_state(gpus), _meta_tensors()
    try:
        with torch.device("meta"), warnings.catch_warnings():
            # of a constructor that loads weights from a file
            warnings.filterwarnings("ignore", "for .* copying from a non-meta parameter")
            model = build()
        _forget_values(model)
        problem = _difference_on_meta(model, random_state["torch"], earlier)
    except Exception as error:  # of any type; the second build raises the model's own
        problem = f"{type(error).__name__}: {error}"
    if problem:
        log.warning(
            "this rank builds the whole model on the CPU, since torch's meta device can't build it: %s", problem
        )
        restore_rng(random_state, gpus)
        model = build()
        _forget_values(model)
    return model


def send_values(values: InitialValues, model: nn.Module, world: World, *, without: Collection[int] = ()) -> None:
    """Give each rank its parts of rank zero's values; collective.

    Besides the parts, one whole tensor at a time is on a device.

    Args:
        values: of `build_on_rank_zero`; rank zero's are removed as they are sent.
        model: sharded, with memory for its shards and buffers, except for those that only other ranks have.
        world: the ranks.
        without: ids of parameters and buffers that are left without values; of the same ones on every rank.
    """
    targets = _named(model)
    for names in list(values):
        value = values.pop(names)
        # what modules shared may have been sharded apart
        own = {id(targets[name]): targets[name] for name in names}
        if not own.keys().isdisjoint(without):
            continue
        whole = torch.empty(value.shape, dtype=value.dtype, device=world.device)
        if world.is_rank_zero:
            whole.copy_(value)
        if whole.numel():
            # as bytes: gloo doesn't send all types
            dist.broadcast(whole.flatten().view(torch.uint8), 0)
        for target in own.values():
            copy_saved(target.detach(), whole)


def give_memory(root: nn.Module, model: nn.Module, device: torch.device, *, of_buffers: torch.device) -> None:
    """Give a sharded model memory without values.

    Args:
        root: the module around the model that was sharded.
        model: with shards on `meta` in the place of its parameters, and buffers on `meta`.
        device: of this rank's shards.
        of_buffers: their device.
    """
    before = _named(model)
    root.to_empty(device=device)
    found = _named(model)
    # to_empty gives a tensor of its own to each module that shared one
    first: dict[int, str] = {}
    for name, tensor in before.items():
        shared = first.setdefault(id(tensor), name)
        path, _, attribute = name.rpartition(".")
        if shared != name:
            setattr(model.get_submodule(path), attribute, found[shared])
        elif not isinstance(tensor, nn.Parameter) and found[name].device != of_buffers:
            found[name] = torch.empty_like(found[name], device=of_buffers)
            setattr(model.get_submodule(path), attribute, found[name])


def _named(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def _by_names(model: nn.Module) -> InitialValues:
    names: dict[int, list[str]] = {}
    tensors = _named(model)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return {(*shared,): tensors[shared[0]] for shared in names.values()}


def _forget_values(model: nn.Module) -> None:
    """Put new parameters and buffers on `meta` in the place of those of a model; what modules share stays shared.

    Afterwards, the earlier parameters are NaN.
    """
    for names, tensor in _by_names(model).items():
        empty = tensor.detach().to("meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, tensor.requires_grad)
            if tensor.is_floating_point() and not tensor.is_meta:
                # a model that keeps it in a list, too, would compute with values that are never trained
                tensor.data = tensor.detach().new_full((), math.nan).expand(tensor.shape)
        vars(empty).update(vars(tensor))
        for name in names:
            path, _, attribute = name.rpartition(".")
            # not into the module's dicts: an RNN has its weights in a list, too
            setattr(model.get_submodule(path), attribute, empty)


def _difference_on_meta(model: nn.Module, random_state: Tensor, earlier: dict[int, Tensor]) -> str:
    """Return what else than the values may be different from an ordinary build; empty if nothing is.

    Args:
        model: built on `meta`; its parameters and buffers are replaced.
        random_state: of the CPU, before the build.
        earlier: `_meta_tensors` before the build.
    """
    if not torch.equal(random_state, torch.get_rng_state()):
        return "it draws random numbers on the CPU, which depend on those drawn before"
    gc.collect()
    others = _meta_tensors().keys() - earlier.keys() - {id(tensor) for tensor in _named(model).values()}
    if others:
        return f"tensors that are neither parameters nor buffers would have no values ({len(others)})"
    return ""


def _meta_tensors() -> dict[int, Tensor]:
    return {id(each): each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.is_meta}

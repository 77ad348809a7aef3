"""The initial values of a model that the ranks of a mesh share: rank zero computes and sends them.

So one path serves shards, replicas, tensor parallelism and pipelines, with the values of a single device; but rank
zero's host memory bounds the model. An earlier version recorded an ordinary build in dispatch modes and repeated it for
each tensor: no rank held the whole model, but 1,100 lines depended on torch's internals.

Why it is like this: docs/adr/0024-models-sharded-over-a-mesh.md.
"""

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
from hpctrain.rank.world import World

InitialValues: TypeAlias = dict[tuple[str, ...], Tensor]
"""The parameters, then the buffers, each by all of its names; on `meta` on all ranks but rank zero."""

log = logging.getLogger("hpctrain.train")


def build_on_rank_zero(build: Callable[[], nn.Module], world: World) -> tuple[nn.Module, InitialValues]:
    """Build a model with values on rank zero alone, which are those of a single device; collective.

    Afterwards, all ranks have rank zero's random state.

    Args:
        build: builds the model; the other ranks call it inside ``torch.device("meta")``.
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
    # a build on meta draws nothing, so the other ranks' generators are behind
    restore_rng(world.broadcast(rng_state(world.gpus)), world.gpus)
    return model, values


def build_without_values(build: Callable[[], nn.Module], gpus: Sequence[torch.device] = ()) -> nn.Module:
    """Build a model whose parameters and buffers are on `meta`, without memory; everything else is as usual.

    If that doesn't work on `meta`, the model is built on the CPU and loses its values afterwards.

    Args:
        build: builds the model; it is called a second time if it can't be built on `meta`.
        gpus: of this rank.
    """
    random_state, earlier = rng_state(gpus), _meta_tensors()
    try:
        with torch.device("meta"), warnings.catch_warnings():
            # torch warns if a constructor loads weights from a file into tensors on meta
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

    Each rank's device holds one whole tensor at a time, besides its parts.

    Args:
        values: of `build_on_rank_zero`; emptied as they are sent, to free rank zero's memory.
        model: sharded, with memory for its shards and buffers; those that only other ranks have are on `meta`.
        world: the ranks.
        without: ids of parameters and buffers that get no values; of the same ones on every rank.
    """
    targets = _named(model)
    for names in list(values):
        value = values.pop(names)
        # a tensor that modules shared may have become several shards
        shards = {id(targets[name]): targets[name] for name in names}
        if not shards.keys().isdisjoint(without):
            continue
        full_value = torch.empty(value.shape, dtype=value.dtype, device=world.device)
        if world.is_rank_zero:
            full_value.copy_(value)
        if full_value.numel():
            # Whole tensors: each layout of a mesh would need a scatter of its own, and they are sent once in a run. As
            # bytes: gloo doesn't send all types.
            dist.broadcast(full_value.flatten().view(torch.uint8), 0)
        for shard in shards.values():
            copy_saved(shard.detach(), full_value)


def give_memory(root: nn.Module, model: nn.Module, device: torch.device, *, of_buffers: torch.device) -> None:
    """Allocate the memory of a sharded model, without values.

    Args:
        root: the module around the model that was sharded.
        model: with shards on `meta` in the place of its parameters, and buffers on `meta`.
        device: of this rank's shards.
        of_buffers: the device of the buffers.
    """
    before = _named(model)
    root.to_empty(device=device)
    allocated = _named(model)
    # to_empty allocates a tensor for each module, also if modules shared one: share it again
    first_names: dict[int, str] = {}
    for name, tensor in before.items():
        first_name = first_names.setdefault(id(tensor), name)
        path, _, attribute = name.rpartition(".")
        if first_name != name:
            setattr(model.get_submodule(path), attribute, allocated[first_name])
        elif not isinstance(tensor, nn.Parameter) and allocated[name].device != of_buffers:
            allocated[name] = torch.empty_like(allocated[name], device=of_buffers)
            setattr(model.get_submodule(path), attribute, allocated[name])


def _named(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def _by_names(model: nn.Module) -> InitialValues:
    names: dict[int, list[str]] = {}
    tensors = _named(model)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return {(*shared,): tensors[shared[0]] for shared in names.values()}


def _forget_values(model: nn.Module) -> None:
    """Replace the parameters and buffers of a model by new ones on `meta`; what modules share stays shared.

    The replaced floating-point parameters become NaN.
    """
    for names, tensor in _by_names(model).items():
        empty = tensor.detach().to("meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, tensor.requires_grad)
            if tensor.is_floating_point() and not tensor.is_meta:
                # a model that also keeps it in a list would compute with values that are never trained: NaN shows it
                tensor.data = tensor.detach().new_full((), math.nan).expand(tensor.shape)
        vars(empty).update(vars(tensor))
        for name in names:
            path, _, attribute = name.rpartition(".")
            # setattr, since an RNN's also updates its list of weights
            setattr(model.get_submodule(path), attribute, empty)


def _difference_on_meta(model: nn.Module, random_state: Tensor, earlier: dict[int, Tensor]) -> str:
    """Describe a difference from an ordinary build, other than the missing values; empty if there is none.

    Args:
        model: built on `meta`; its parameters and buffers are replaced.
        random_state: of the CPU, before the build.
        earlier: `_meta_tensors` before the build.
    """
    if not torch.equal(random_state, torch.get_rng_state()):
        return "it draws random numbers on the CPU, which depend on those drawn before"
    gc.collect()
    extra_tensors = _meta_tensors().keys() - earlier.keys() - {id(tensor) for tensor in _named(model).values()}
    if extra_tensors:
        return f"tensors that are neither parameters nor buffers would have no values ({len(extra_tensors)})"
    return ""


def _meta_tensors() -> dict[int, Tensor]:
    return {id(item): item for item in gc.get_objects() if issubclass(type(item), Tensor) and item.is_meta}

"""Restore a live model and optimizer from saved tensors: exactly, or not at all."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.checkpoint.host_memory import HostMemory
from hpctrain.checkpoint.state import CHANGED_BUFFERS, NAMED, PlainNames, names_by_id, parameter_names
from hpctrain.checkpoint.stored_tensor import StoredTensor
from hpctrain.data.micro_batch import map_tensors
from hpctrain.errors import CheckpointError
from hpctrain.parallel.local_part import is_dtensor, local_part
from hpctrain.phrases import listed
from hpctrain.run.checkpoint_manifest import Region

_INITIAL_LR = "initial_lr"

log = logging.getLogger("hpctrain.checkpoint")


def restore_weights(
    saved: Mapping[str, Any],
    model: nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
    scalers: Mapping[str, torch.amp.GradScaler] | None = None,
    *,
    changed_options: Mapping[str, Collection[str]] | None = None,
) -> None:
    """Restore model, optimizers and scalers; not collective.

    Args:
        saved: `LoadedCheckpoint.states`.
        model: on any device, with or without wrappers; its tensors are copied into, and buffers replaced whose shape or
            dtype training had changed.
        optimizers: over the model's parameters, by name; the name of a single one is ''. None leaves them out.
        scalers: by name, too; one of which no state was saved starts afresh, with a warning.
        changed_options: options of the optimizers that keep their current value, by name; see `restore_optimizer`.

    Raises:
        CheckpointError: names, shapes, dtypes or options differ; the message starts with the path and lists them.
    """
    try:
        restore_model(model, saved["model"], saved.get(CHANGED_BUFFERS, ()))
        if optimizers is not None:
            _restore_optimizers(saved, model, optimizers, changed_options or {})
    except CheckpointError as error:
        raise CheckpointError(f"{saved['path']}: {error}") from error
    if scalers:
        _restore_scalers(saved, scalers)


def _restore_optimizers(
    saved: Mapping[str, Any],
    model: nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    changed_options: Mapping[str, Collection[str]],
) -> None:
    states, saved_names = saved["optimizers"], saved["parameters"]
    if NAMED in states and "param_groups" not in states:
        states = states[NAMED]
    else:
        states, saved_names = {"": states}, {"": saved_names}
    if states.keys() != optimizers.keys():
        there = "one optimizer without a name" if "" in states else f"the optimizers {listed(states)}"
        here = "one" if "" in optimizers else listed(optimizers)
        raise CheckpointError(
            f"the checkpoint has {there}, the configuration has {here}. Resume with the optimizers "
            "that were saved, or start a new run from its weights with init_from"
        )
    names = names_by_id(model)
    for name, optimizer in optimizers.items():
        try:
            restore_optimizer(
                optimizer,
                states[name],
                names=parameter_names(names, optimizer),
                saved_names=saved_names[name],
                changed_options=changed_options.get(name, ()),
            )
        except CheckpointError as error:
            raise CheckpointError(f"optimizer {name}: {error}" if name else str(error)) from error


def _restore_scalers(saved: Mapping[str, Any], scalers: Mapping[str, torch.amp.GradScaler]) -> None:
    states = saved["scaler"] or {}
    # of the only loss, the state is saved as it is; of several, by name
    is_named = all(isinstance(value, Mapping | None) for value in states.values())
    states = states if is_named else {"": states}
    for name, scaler in scalers.items():
        if not scaler.is_enabled():
            continue
        if state := states.get(name):
            scaler.load_state_dict(state)
        else:
            of_loss = f" of the loss of optimizer {name}" if name else ""
            log.warning("%s holds no state of a gradient scaler%s: the scale starts afresh", saved["path"], of_loss)


def restore_model(model: nn.Module, saved: Mapping[str, Any], changed_buffers: Collection[str] = ()) -> None:
    """Copy the saved tensors into the model, on any device; nothing is copied unless everything fits.

    Args:
        model: with or without wrappers.
        saved: plain name -> tensor; buffers are included.
        changed_buffers: buffers whose shape or dtype training had changed, or which it had added or removed: the model
            gets them as they were saved.

    Raises:
        CheckpointError: names, shapes or dtypes differ.
    """
    plain = PlainNames(model)
    model_state = model.state_dict()
    live_names = {plain(name): name for name in model_state}
    owners = _replaceable_buffers(model, changed_buffers, saved) if changed_buffers else {}
    problems = describe_difference("only in the checkpoint", saved.keys() - live_names.keys() - owners.keys())
    problems += describe_difference("only in the model", live_names.keys() - saved.keys() - owners.keys())
    common_tensors = [
        (name, saved[name], model_state[live_name]) for name, live_name in live_names.items() if name in saved
    ]
    problems += describe_difference(
        "not alike",
        (
            f"{name} ({_dtype_and_shape(saved_value)} saved, {_dtype_and_shape(value)} here)"
            for name, saved_value, value in common_tensors
            if _dtype_and_shape(saved_value) != _dtype_and_shape(value) and name not in owners
        ),
    )
    if problems:
        raise CheckpointError(
            f"the checkpoint doesn't fit the model: {'; '.join(problems)}. Resume with the model that was saved, "
            "or start a new run from its weights with init_from"
        )
    if owners:
        _replace_buffers(model, owners, saved)
        restore_model(model, saved)
        return
    if any(
        isinstance(saved_value, StoredTensor) or (isinstance(value, Tensor) and is_dtensor(value))
        for _, saved_value, value in common_tensors
    ):
        _copy_parts(model, {live_name: saved[name] for name, live_name in live_names.items()}, model_state)
        return
    state = OrderedDict((live_name, saved[name]) for name, live_name in live_names.items())
    if (versions := getattr(saved, "_metadata", None)) is not None:
        paths = {plain(path): path for path, _ in model.named_modules(remove_duplicate=False)}
        state._metadata = {paths.get(path, path): entry for path, entry in versions.items()}  # type: ignore[attr-defined]
    model.load_state_dict(state, strict=True)


def _replaceable_buffers(
    model: nn.Module, changed_buffers: Collection[str], saved: Mapping[str, Any]
) -> dict[str, tuple[nn.Module, str]]:
    """Return the module of each buffer that can be replaced by the saved one or removed, and its name there."""
    plain = PlainNames(model)
    modules = {plain(path): module for path, module in model.named_modules(remove_duplicate=False)}
    owners = {}
    for name in changed_buffers:
        path, _, attribute = name.rpartition(".")
        module = modules.get(path)
        if module is not None and (attribute in module._buffers or (name in saved and not hasattr(module, attribute))):
            owners[name] = module, attribute
    return owners


def _replace_buffers(model: nn.Module, owners: Mapping[str, tuple[nn.Module, str]], saved: Mapping[str, Any]) -> None:
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    for name, (module, attribute) in owners.items():
        before = module._buffers.get(attribute)
        value = None
        if name in saved:
            value = torch.empty_like(saved[name], device=device if before is None else before.device)
        if attribute in module._buffers:
            module._buffers[attribute] = value
        else:
            module.register_buffer(attribute, value)


def _copy_parts(model: nn.Module, saved: Mapping[str, Any], model_state: Mapping[str, Any]) -> None:
    """Copy what this rank holds, tensor by tensor, so that no whole model is in memory; then the rest."""
    for name, value in model_state.items():
        if isinstance(value, Tensor):
            copy_saved(value, saved[name])
    extra_state = {name: value for name, value in saved.items() if not isinstance(model_state[name], Tensor)}
    with warnings.catch_warnings():
        # of a batch norm that only other ranks have, and for which torch adds a count of batches
        warnings.filterwarnings("ignore", "for .* copying from a non-meta parameter")
        # with hooks that the model's modules, or hpctrain, have for the end of loading
        model.load_state_dict(extra_state, strict=False)


@torch.no_grad()
def copy_saved(target: Tensor, saved: Tensor | StoredTensor) -> None:
    """Copy a saved tensor into one of this rank, or the part of it that this rank holds; not collective.

    Args:
        target: of the same shape, on any device, perhaps a DTensor; nothing is copied to `meta`, where a rank has those
            parts of a model that only others compute.
        saved: a tensor, or one of which several ranks wrote parts.
    """
    if target.is_meta:
        return
    source = saved if isinstance(saved, StoredTensor) else StoredTensor.of(saved)
    if not is_dtensor(target):
        source.copy_into(target, Region.whole(tuple(target.shape)))
        return
    # only where a mesh is: it imports torch's DTensor, which takes half a second
    from hpctrain.parallel.sharded_tensor import local_pieces

    shard = local_part(target)
    for piece in local_pieces(target):
        source.copy_into(shard[piece.place.slices()], piece.region)


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Any],
    *,
    names: Sequence[Sequence[str]],
    saved_names: Sequence[Sequence[str]],
    changed_options: Collection[str] = (),
) -> None:
    """Restore the optimizer's saved state and groups, learning rates included, bit for bit.

    Groups hold options, but some optimizers also keep counts and estimates there. So everything that was saved is
    restored, except for options that the user changed on purpose.

    Args:
        optimizer: over the same parameters in the same order and groups.
        saved: its state dict.
        names: `parameter_names` of this optimizer.
        saved_names: `parameter_names` of the saved optimizer.
        changed_options: options that keep their current value; `_target_` among them means that the class has changed.

    Raises:
        CheckpointError: parameters or groups differ, or another class doesn't have the options.
    """
    # not strict: `_other_parameters` describes the difference in a sentence
    groups = list(zip(saved["param_groups"], optimizer.param_groups, strict=False))
    problems = _other_parameters(saved_names, names)
    if "_target_" in changed_options:
        unknown = {option for old, new in groups for option in old.keys() - new.keys()} - {_INITIAL_LR}
        problems = describe_difference("options that this optimizer doesn't have", unknown) + problems
    if problems:
        raise CheckpointError(
            f"the checkpoint doesn't fit the optimizer ({type(optimizer).__name__}): {'; '.join(problems)}. "
            "Resume with the optimizer that was saved, or start a new run from its weights with init_from"
        )
    saved = _as_parts(optimizer, saved)
    # pass the groups with the state: torch places the step count on the device that the group's options require
    optimizer.load_state_dict(
        {**saved, "param_groups": [_merge_group(old, new, changed_options) for old, new in groups]}
    )
    _unmap_state(optimizer, saved)


def _as_parts(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the saved state, in which what belongs to a sharded parameter is a `StoredTensor`.

    The optimizer would copy whole tensors to the parameter's device, and leaves other objects as they are.
    """
    parameters = dict(_by_index(optimizer, saved))
    if not any(is_dtensor(parameter) for parameter in parameters.values()):
        return saved
    state = {
        index: map_tensors(partial(_as_part, parameters[index]), value) if index in parameters else value
        for index, value in saved["state"].items()
    }
    return {**saved, "state": state}


def _as_part(parameter: Tensor, value: Any) -> Any:
    # a count of steps has no dimension, and each rank has its own
    is_divided = isinstance(value, Tensor) and value.dim() and is_dtensor(parameter)
    return StoredTensor.of(value) if is_divided else value


def _by_index(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> Iterator[tuple[int, Tensor]]:
    for old, new in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        yield from zip(old["params"], new["params"], strict=True)


def _unmap_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    # Copied out of the mapping: the first step would copy it page by page, several times slower, and a mapped file
    # takes up disk space until the run ends, even after its checkpoint was removed. To read the file into memory that
    # the tensors keep is no faster (0.36 s against 0.35 s from the disk for 50 million parameters), and needs a parser.
    memory = HostMemory()
    of_parameters: set[object] = set()
    for index, parameter in _by_index(optimizer, saved):
        of_parameters.add(index)
        for key, value in saved["state"].get(index, {}).items():
            optimizer.state[parameter][key] = _unmapped(optimizer.state[parameter][key], value, memory, parameter)
    # state that an optimizer keeps for all parameters
    for key in saved["state"].keys() - of_parameters:
        optimizer.state[key] = _unmapped(optimizer.state[key], saved["state"][key], memory, None)


def _merge_group(saved: Mapping[str, Any], here: Mapping[str, Any], changed_options: Collection[str]) -> dict[str, Any]:
    current = {option: here[option] for option in (*changed_options, _INITIAL_LR) if option in here}
    on_device = {
        name: value.to(here[name].device)
        for name, value in saved.items()
        if isinstance(value, Tensor) and isinstance(here.get(name), Tensor)
    }
    return {**here, **saved, **on_device, **current}


def _other_parameters(saved: Sequence[Sequence[str]], here: Sequence[Sequence[str]]) -> list[str]:
    sizes = [len(group) for group in saved], [len(group) for group in here]
    if sizes[0] != sizes[1]:
        return [f"parameters per group: {sizes[0]} saved, {sizes[1]} here"]
    pairs = (pair for old, new in zip(saved, here, strict=True) for pair in zip(old, new, strict=True))
    swaps = (f"{old} saved where {new} is here" for old, new in pairs if old != new)
    return describe_difference("another order", swaps)


def _dtype_and_shape(value: object) -> str:
    if not isinstance(value, Tensor | StoredTensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _unmapped(loaded: Any, saved: Any, memory: HostMemory, parameter: Tensor | None) -> Any:
    """Return the optimizer's loaded state, copied out of the file's mapping and in the dtype that was saved."""
    if isinstance(saved, StoredTensor):
        return _local_copy(saved, memory, parameter)
    if isinstance(saved, Tensor):
        if loaded.device.type == "cpu":
            return memory.empty_like(saved).copy_(saved)
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device, copy=True)
    if isinstance(saved, dict):
        return {key: _unmapped(loaded[key], value, memory, parameter) for key, value in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_unmapped(mine, value, memory, parameter) for mine, value in zip(loaded, saved, strict=True))
    return loaded


def _local_copy(saved: StoredTensor, memory: HostMemory, parameter: Tensor | None) -> Tensor:
    """Return what this rank holds of a saved tensor, placed as the parameter to which it belongs."""
    device = torch.device("cpu") if parameter is None else local_part(parameter).device

    def empty(sizes: tuple[int, ...]) -> Tensor:
        form = torch.empty(sizes, dtype=saved.dtype, device="meta")
        return memory.empty_like(form) if device.type == "cpu" else torch.empty_like(form, device=device)

    if parameter is None or not is_dtensor(parameter):
        copy = empty(saved.shape)
    else:
        # only where a mesh is: it imports torch's DTensor, which takes half a second
        from hpctrain.parallel.sharded_tensor import local_sizes, pieces_like, placed_like

        copy = placed_like(empty(local_sizes(pieces_like(parameter, saved.shape))), parameter, saved.shape)
    copy_saved(copy, saved)
    return copy


def describe_difference(what: str, names: Iterable[str]) -> list[str]:
    """Describe a difference in one phrase, such as ``only in the model: a, b and 3 more``; empty without names."""
    sorted_names = sorted(names)
    return [f"{what}: {listed(sorted_names)}"] if sorted_names else []

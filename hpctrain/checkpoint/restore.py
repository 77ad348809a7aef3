"""Restore a live model and optimizer from saved tensors: exactly, or not at all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.checkpoint.host_memory import HostMemory
from hpctrain.checkpoint.state import PlainNames
from hpctrain.errors import CheckpointError
from hpctrain.phrases import listed

_INITIAL_LR = "initial_lr"


def restore_model(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Copy the saved tensors into the model, on any device; nothing is copied unless everything fits.

    Args:
        model: with or without wrappers.
        saved: plain name -> tensor; buffers are included.

    Raises:
        CheckpointError: names, shapes or dtypes differ.
    """
    plain = PlainNames(model)
    here = model.state_dict()
    own_names = {plain(name): name for name in here}
    problems = differing("only in the checkpoint", saved.keys() - own_names.keys())
    problems += differing("only in the model", own_names.keys() - saved.keys())
    shared = [(name, saved[name], here[own]) for name, own in own_names.items() if name in saved]
    problems += differing("not alike", (_difference(*pair) for pair in shared if _kind(pair[1]) != _kind(pair[2])))
    if problems:
        raise CheckpointError(
            f"the checkpoint doesn't fit the model: {'; '.join(problems)}. Resume with the model that was saved, "
            "or start a new run from its weights with init_from"
        )
    state = OrderedDict((own, saved[name]) for name, own in own_names.items())
    if (versions := getattr(saved, "_metadata", None)) is not None:
        paths = {plain(path): path for path, _ in model.named_modules(remove_duplicate=False)}
        state._metadata = {paths.get(path, path): entry for path, entry in versions.items()}  # type: ignore[attr-defined]
    model.load_state_dict(state, strict=True)


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Any],
    *,
    names: Sequence[Sequence[str]],
    saved_names: Sequence[Sequence[str]],
    changed: Collection[str] = (),
) -> None:
    """Restore the optimizer's saved state and groups, learning rates included, bit for bit.

    Groups hold options, but some optimizers also keep counts and estimates there. So everything that was saved is
    restored, except for options that the user changed on purpose.

    Args:
        optimizer: over the same parameters in the same order and groups.
        saved: its state dict.
        names: `parameter_names` of this optimizer.
        saved_names: `parameter_names` of the saved optimizer.
        changed: options that keep their current value; `_target_` among them means that the class has changed.

    Raises:
        CheckpointError: parameters or groups differ, or another class doesn't have the options.
    """
    # not strict: `_other_parameters` describes the difference in a sentence
    groups = list(zip(saved["param_groups"], optimizer.param_groups, strict=False))
    problems = _other_parameters(saved_names, names)
    if "_target_" in changed:
        unknown = {option for old, new in groups for option in old.keys() - new.keys()} - {_INITIAL_LR}
        problems = differing("options that this optimizer doesn't have", unknown) + problems
    if problems:
        raise CheckpointError(
            f"the checkpoint doesn't fit the optimizer ({type(optimizer).__name__}): {'; '.join(problems)}. "
            "Resume with the optimizer that was saved, or start a new run from its weights with init_from"
        )
    # pass the groups with the state: torch places the step count on the device that the group's options require
    optimizer.load_state_dict({**saved, "param_groups": [_group(old, new, changed) for old, new in groups]})
    _own_state(optimizer, saved)


def _own_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    # Copied out of the mapping: the first step would copy it page by page, several times slower, and a mapped file
    # takes up disk space until the run ends, even after its checkpoint was removed.
    memory = HostMemory()
    of_parameters: set[object] = set()
    for old, new in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        for index, parameter in zip(old["params"], new["params"], strict=True):
            of_parameters.add(index)
            for key, value in saved["state"].get(index, {}).items():
                optimizer.state[parameter][key] = _owned(optimizer.state[parameter][key], value, memory)
    # state that an optimizer keeps for all parameters
    for key in saved["state"].keys() - of_parameters:
        optimizer.state[key] = _owned(optimizer.state[key], saved["state"][key], memory)


def _group(saved: Mapping[str, Any], here: Mapping[str, Any], changed: Collection[str]) -> dict[str, Any]:
    kept = {option: here[option] for option in (*changed, _INITIAL_LR) if option in here}
    on_device = {
        name: value.to(here[name].device)
        for name, value in saved.items()
        if isinstance(value, Tensor) and isinstance(here.get(name), Tensor)
    }
    return {**here, **saved, **on_device, **kept}


def _other_parameters(saved: Sequence[Sequence[str]], here: Sequence[Sequence[str]]) -> list[str]:
    sizes = [len(group) for group in saved], [len(group) for group in here]
    if sizes[0] != sizes[1]:
        return [f"parameters per group: {sizes[0]} saved, {sizes[1]} here"]
    pairs = (pair for old, new in zip(saved, here, strict=True) for pair in zip(old, new, strict=True))
    return differing("another order", (f"{old} saved where {new} is here" for old, new in pairs if old != new))


def _kind(value: object) -> object:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else type(value)


def _difference(name: str, saved: object, here: object) -> str:
    return f"{name} ({_shown(saved)} saved, {_shown(here)} here)"


def _shown(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _owned(loaded: Any, saved: Any, memory: HostMemory) -> Any:
    """Return the optimizer's loaded state, copied out of the file's mapping and in the dtype that was saved."""
    if isinstance(saved, Tensor):
        if loaded.device.type == "cpu":
            return memory.empty_like(saved).copy_(saved)
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device, copy=True)
    if isinstance(saved, dict):
        return {key: _owned(loaded[key], value, memory) for key, value in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_owned(mine, value, memory) for mine, value in zip(loaded, saved, strict=True))
    return loaded


def differing(what: str, names: Iterable[str]) -> list[str]:
    """Describe a difference in one phrase, such as ``only in the model: a, b and 3 more``; empty without names."""
    found = sorted(names)
    return [f"{what}: {listed(found)}"] if found else []

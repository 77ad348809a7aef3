"""Names of a model's tensors without those of the wrappers around it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


class PlainNames:
    """Leaves out the ``module.`` of DDP and the ``_orig_mod.`` of torch.compile, wherever in the tree they are.

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
        """The plain form of the name of a module, parameter or buffer of the model."""
        if not self._wrapped:
            return name
        parts = name.split(".")
        return ".".join(part for i, part in enumerate(parts) if ".".join(parts[: i + 1]) not in self._wrapped)


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Plain names of what an optimizer trains, by its groups; empty for what isn't the model's.

    An optimizer's state dict knows its parameters by their position alone.
    """
    plain = PlainNames(model)
    names = {id(parameter): plain(name) for name, parameter in model.named_parameters()}
    return [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]

"""A pass through the model that adds nothing, with which a rank whose batch has weight 0 takes part in collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from hpctrain.data.micro_batch import iterate_tensors
from hpctrain.distributed.compiler import uncompiled
from hpctrain.train.modes import frozen_batch_norms


class EmptyPass:
    """A forward and a backward pass whose gradients are zero, even if the loss is NaN because it has no samples.

    A loss multiplied by zero isn't enough: where a mean over nothing divides by zero, its gradient becomes NaN. So
    gradients are set to zero where they reach a module's output or a parameter. With `SyncBatchNorm`, the losses of
    other ranks have gradients that pass through this rank's samples: then only NaN and infinity are set to zero.
    """

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []
        self._clean: Callable[[Tensor], Tensor] = torch.zeros_like

    @contextmanager
    def forward(self, model: nn.Module) -> Iterator[None]:
        """Context in which to compute the loss; divide it by infinity before the backward pass.

        Args:
            model: that computes the loss.
        """
        if has_shared_statistics(model):
            self._clean = partial(torch.nan_to_num, nan=0.0, posinf=0.0, neginf=0.0)

        def hook(module: nn.Module, _: Any, output: Any) -> None:
            for tensor in iterate_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._clean)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            # in a sharded model these are the gathered weights
            self._parameters += [parameter for parameter in module._parameters.values() if parameter is not None]

        handle = register_module_forward_hook(hook)
        try:
            with uncompiled(), frozen_batch_norms(model):
                yield
        finally:
            handle.remove()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context in which to compute the gradients."""
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        handles = [parameter.register_hook(self._clean) for parameter in trained]  # type: ignore[no-untyped-call]  # as above
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def exchanges_nothing(replica: nn.Module) -> bool:
    """Whether the model exchanges neither parts of its weights nor batch statistics with other ranks in a pass."""
    return not getattr(replica, "is_sharded", False) and not has_shared_statistics(replica)


def has_shared_statistics(model: nn.Module) -> bool:
    """Whether the model has a `SyncBatchNorm`, whose statistics are those of all ranks' samples."""
    return any(isinstance(part, nn.SyncBatchNorm) for part in model.modules())


def zero_of(model: nn.Module) -> Tensor:
    """Return 0 as a loss, 0-d, that depends on every parameter: DDP waits for the gradients of each."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # over no elements, so that a parameter that isn't finite doesn't make it NaN
    sums = [parameter.reshape(-1)[:0].abs().sum().to(trained[0].device, torch.float32) for parameter in trained]
    return torch.stack(sums).sum()

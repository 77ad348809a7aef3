"""A pass through the model that adds nothing: by it, a rank whose batch has no weight takes part in collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from hpctrain.data.micro_batch import iterate_tensors
from hpctrain.distributed.compiler import uncompiled
from hpctrain.train.modes import batch_norms_at_rest


class EmptyPass:
    """A forward and a backward pass whose gradients are zero, whatever the loss is: over no samples it may be NaN.

    Zeros from the loss on aren't enough: where a mean over nothing divides by zero, they become NaN. So gradients are
    set to zero where they leave a module's output, and where they reach a parameter.
    """

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []

    @contextmanager
    def forward(self, model: nn.Module) -> Iterator[None]:
        """Compute the loss in the context.

        Args:
            model: that computes it.
        """

        def note(module: nn.Module, _: Any, output: Any) -> None:
            for tensor in iterate_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            # in a sharded model these are the gathered weights
            self._parameters += [each for each in module._parameters.values() if each is not None]

        handle = register_module_forward_hook(note)
        try:
            with uncompiled(), batch_norms_at_rest(model):
                yield
        finally:
            handle.remove()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Compute the gradients in the context."""
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        handles = [parameter.register_hook(torch.zeros_like) for parameter in trained]  # type: ignore[no-untyped-call]  # as above
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def is_alone(replica: nn.Module) -> bool:
    """Whether no other rank waits for what the model exchanges in a pass: parts of its weights, or statistics."""
    if getattr(replica, "is_sharded", False):
        return False
    return not any(isinstance(part, nn.SyncBatchNorm) for part in replica.modules())


def zero_of(model: nn.Module) -> Tensor:
    """Return 0 as a loss, 0-d, that depends on every parameter: DDP waits for the gradients of each."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # over no element, so that a parameter that isn't finite makes no NaN
    sums = [parameter.reshape(-1)[:0].abs().sum().to(trained[0].device, torch.float32) for parameter in trained]
    return torch.stack(sums).sum()

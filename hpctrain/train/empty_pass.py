"""A pass through the model that adds nothing: by it, a rank whose batch has no weight takes part in collectives."""

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
    """A forward and a backward pass whose gradients are zero, whatever the loss is: over no samples it may be NaN.

    Zeros from the loss on aren't enough: where a mean over nothing divides by zero, they become NaN. So gradients are
    set to zero where they reach a module's output, and where they reach a parameter. With `SyncBatchNorm`, what other
    ranks' losses owe to the samples of this one passes: there only NaN is set to zero.
    """

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []
        self._clean: Callable[[Tensor], Tensor] = torch.zeros_like

    @contextmanager
    def forward(self, model: nn.Module) -> Iterator[None]:
        """Compute the loss in the context.

        Args:
            model: that computes it. Divide the loss by infinity before the backward pass.
        """
        if has_shared_statistics(model):
            self._clean = partial(torch.nan_to_num, nan=0.0, posinf=0.0, neginf=0.0)

        def note(module: nn.Module, _: Any, output: Any) -> None:
            for tensor in iterate_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._clean)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            # in a sharded model these are the gathered weights
            self._parameters += [each for each in module._parameters.values() if each is not None]

        handle = register_module_forward_hook(note)
        try:
            with uncompiled(), frozen_batch_norms(model):
                yield
        finally:
            handle.remove()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Compute the gradients in the context."""
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        handles = [parameter.register_hook(self._clean) for parameter in trained]  # type: ignore[no-untyped-call]  # as above
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def exchanges_nothing(replica: nn.Module) -> bool:
    """Whether no other rank waits for what the model exchanges in a pass: parts of its weights, or statistics."""
    return not getattr(replica, "is_sharded", False) and not has_shared_statistics(replica)


def has_shared_statistics(model: nn.Module) -> bool:
    """Whether a batch norm has the statistics of all ranks' samples."""
    return any(isinstance(part, nn.SyncBatchNorm) for part in model.modules())


def zero_of(model: nn.Module) -> Tensor:
    """Return 0 as a loss, 0-d, that depends on every parameter: DDP waits for the gradients of each."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # over no element, so that a parameter that isn't finite makes no NaN
    sums = [parameter.reshape(-1)[:0].abs().sum().to(trained[0].device, torch.float32) for parameter in trained]
    return torch.stack(sums).sum()

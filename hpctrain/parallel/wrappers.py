"""The wrappers in which training calls a model, and the model inside of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import parallel
from torch.nn.parallel import DistributedDataParallel


class LossModule(nn.Module):
    """A module whose forward pass is a whole loss, so that DDP surrounds all calls of the model and its parts at once.

    Args:
        module: with which the loss is computed.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        # DDP asks only the module that it wraps which names to leave out
        ignored: Iterable[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        self._ddp_params_and_buffers_to_ignore = [f"module.{name}" for name in ignored]

    def forward(self, compute: Callable[[nn.Module], Tensor]) -> Tensor:
        """Call ``compute``, which returns a loss, with the module."""
        return compute(self._modules["module"])  # type: ignore[arg-type]  # the constructor sets it

    # nothing hooks this module, and torch's way from a call to `forward` costs a few microseconds in each step
    __call__ = forward


class AutocastDataParallel(parallel.DataParallel[nn.Module]):
    """nn.DataParallel whose threads also use the caller's autocast format.

    torch's `parallel_apply` passes on only whether autocast is enabled; the format is a thread's own, so that bf16
    would silently become fp16, without a loss scale. Other state of a thread, such as `torch.overrides` modes, isn't
    passed on. Replicas share the model's attributes, so a bound method in an attribute uses the first GPU's weights.
    """

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Call each replica in a thread of its own."""
        calls: Any = [with_callers_autocast(replica, "cuda") for replica in replicas]
        return super().parallel_apply(calls, inputs, kwargs)


def with_callers_autocast(compute: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """Wrap a function so that it runs under this thread's autocast settings, whichever thread calls it.

    Args:
        compute: the function.
        device_type: the autocast's.
    """
    if not torch.is_autocast_enabled(device_type):
        return compute
    dtype = torch.get_autocast_dtype(device_type)

    def computing(*arguments: Any, **options: Any) -> Any:
        # a context for each call: it keeps what it restores in itself
        with torch.autocast(device_type, dtype=dtype):
            return compute(*arguments, **options)

    return computing


def inner(model: nn.Module) -> nn.Module:
    """The model inside DDP's and torch.compile's wrappers, whose names checkpoints use."""
    while True:
        wrapped = isinstance(model, DistributedDataParallel | AutocastDataParallel | LossModule)
        inside = model.module if wrapped else getattr(model, "_orig_mod", None)
        if not isinstance(inside, nn.Module):
            return model
        model = inside

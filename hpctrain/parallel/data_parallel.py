"""nn.DataParallel, with the autocast of its caller in each of its threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import parallel


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

"""nn.DataParallel, with the autocast of its caller in each of its threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import parallel


class DataParallel(parallel.DataParallel[nn.Module]):
    """torch's own, whose threads take over whether there is an autocast, but not its format (`parallel_apply`).

    That is a thread's own, so that bf16 would become fp16, without a loss scale. Other things of a thread don't arrive
    either, such as `torch.overrides` modes; and a replica shares the attributes of the model, so that a method that is
    kept in one runs on the first GPU's model.
    """

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Call each replica in a thread of its own."""
        calls: Any = [in_this_autocast(replica, "cuda") for replica in replicas]
        return super().parallel_apply(calls, inputs, kwargs)


def in_this_autocast(compute: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """Return a function as it runs inside the autocast of the thread that calls this, in whichever thread it is called.

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

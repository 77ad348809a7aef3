"""A tensor's values on their way to the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.attempt.lost_gpu import retain_if_gpu_lost

Array = NDArray[Any]


class HostArray:
    """A copy of a tensor or array, which nothing that happens to the original changes.

    A copy from a GPU goes to page-locked memory, and only `values` waits for it.

    Args:
        content: a tensor on any device, or what `np.asarray` takes.

    Attributes:
        shape: of the values.
        num_bytes: that the copy takes.
    """

    def __init__(self, content: Any) -> None:
        self._event: torch.cuda.Event | None = None
        if isinstance(content, Tensor):
            self._held: Tensor | Array = self._copied(content.detach())
        else:
            self._held = np.array(content)
        self.shape = tuple(self._held.shape)
        self.num_bytes = self._held.nbytes

    def values(self) -> Array:
        """Wait for the copy, and return it.

        Raises:
            RuntimeError: the GPU reports an error.
        """
        if self._event is not None and isinstance(self._held, Tensor):
            try:
                self._event.synchronize()
            except RuntimeError as error:
                retain_if_gpu_lost(error, self)
                raise
            self._event = None
            # free the page-locked memory at once: encoding takes long enough for the GPU to be lost meanwhile
            self._held = self._held.clone()
        return self._held.numpy() if isinstance(self._held, Tensor) else self._held

    def is_floating(self) -> bool:
        """Whether the values are floating-point numbers."""
        if isinstance(self._held, Tensor):
            return self._held.is_floating_point()
        return np.issubdtype(self._held.dtype, np.floating)

    def is_real(self) -> bool:
        """Whether the values are booleans or real numbers."""
        if isinstance(self._held, Tensor):
            return not self._held.is_complex()
        return self._held.dtype.kind in "biuf"

    def dtype(self) -> str:
        """The dtype's name, such as ``uint8``."""
        return str(self._held.dtype).removeprefix("torch.")

    def _copied(self, tensor: Tensor) -> Tensor:
        if tensor.dtype in (torch.bfloat16, torch.float16):
            # NumPy has no bfloat16
            tensor = tensor.float()
        if tensor.device.type != "cuda":
            return tensor.cpu().clone(memory_format=torch.contiguous_format)
        held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        held.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._event.record(torch.cuda.current_stream(tensor.device))
        return held

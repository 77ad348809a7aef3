"""Copies to host memory of whatever a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpctrain.checkpoint.host_memory import HostMemory
from hpctrain.errors import CheckpointError

_AS_THEY_ARE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class HostCopy:
    """Copies trees of tensors, numbers, strings, dicts, lists and tuples, so that training may go on changing them.

    Equal tensors that share memory (tied weights) share it in the copy. Strides are kept: kernels may choose their
    order of summation by them. The copy is what ``torch.load(weights_only=True)`` takes: subclasses such as
    ``np.float64`` become plain numbers, and what has no such form is refused. The tensors of a copy hold their values
    after `finish`: in one go, memory is copied at its full speed.

    Args:
        everything: False leaves tensors in host memory where they are, for when nothing changes them meanwhile.
    """

    def __init__(self, *, everything: bool = True) -> None:
        self._everything, self._memory = everything, HostMemory()
        self._copies: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        self._taken: set[int] = set()

    def of(self, value: Any, kept: Any = None, name: str = "") -> Any:
        """A copy of ``value``.

        Args:
            value: the tree.
            kept: an earlier copy; its tensors are written over where their place, shape and dtype are the same.
            name: what to call ``value`` in an error.

        Raises:
            CheckpointError: something in the tree can't be in a checkpoint; its place is named.
        """
        if type(value) in _AS_THEY_ARE:
            return value
        if isinstance(value, Tensor):
            return self._tensor(value, kept, name)
        if isinstance(value, Mapping):
            earlier = kept if isinstance(kept, dict) else {}
            return {
                self._key(key, name): self.of(item, earlier.get(key), f"{name}[{key!r}]") for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            before = kept if isinstance(kept, list | tuple) and len(kept) == len(value) else [None] * len(value)
            copies = [
                self.of(item, old, f"{name}[{i}]") for i, (item, old) in enumerate(zip(value, before, strict=True))
            ]
            return tuple(copies) if isinstance(value, tuple) else copies
        return self._plain(value, name)

    def finish(self) -> None:
        """Return once all copies hold their values; the trees that they were taken from must not have changed."""
        devices = {source.device for source, _ in self._copies.values() if source.device.type != "cpu"}
        for source, target in self._copies.values():
            if target is not source:
                target.copy_(source, non_blocking=True)
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()

    def _tensor(self, tensor: Tensor, kept: Any, name: str) -> Tensor:
        source = tensor.detach()
        if type(source) is not Tensor or source.layout != torch.strided or source.is_quantized or source.is_meta:
            raise CheckpointError(
                f"{name} is a {type(source).__name__} ({source.layout}, {source.device}); "
                "a checkpoint holds dense tensors: keep this out of the state, or convert it"
            )
        lazy = source.is_conj(), source.is_neg()
        identity = (source.device, source.data_ptr(), source.dtype, source.shape, source.stride(), lazy)
        if (copied := self._copies.get(identity)) is not None and source.numel():
            return copied[1]
        target = self._target(source, kept)
        # the source is kept alive with its copy: its address stands for it
        self._copies[identity] = source, target
        self._taken.add(id(target))
        return target

    def _target(self, source: Tensor, kept: Any) -> Tensor:
        if not self._everything and _whole_in_host_memory(source):
            return source
        if isinstance(kept, Tensor) and id(kept) not in self._taken and _same_form(kept, source):
            return kept
        if self._everything and source.device.type == "cuda":
            return torch.empty_like(source, device="cpu", pin_memory=True, requires_grad=False)
        return self._memory.empty_like(source)

    @staticmethod
    def _key(key: object, name: str) -> str | int:
        if isinstance(key, str):
            return str.__str__(key)
        if isinstance(key, int):
            return int(key)
        raise CheckpointError(f"{name} has the key {key!r}; a checkpoint's dicts have strings and integers as keys")

    @staticmethod
    def _plain(value: Any, name: str) -> object:
        if isinstance(value, np.generic):
            value = value.item()
        if type(value) in _AS_THEY_ARE:
            return value
        kinds: tuple[Any, ...] = (int, float, complex, bytes)
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, kinds):
            return next(kind(value) for kind in kinds if isinstance(value, kind))
        raise CheckpointError(
            f"{name} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint holds tensors, numbers, "
            "strings, dicts, lists and tuples: convert it"
        )


def _whole_in_host_memory(source: Tensor) -> bool:
    """Whether saving it saves nothing else: torch.save writes the whole storage that a view belongs to."""
    return (
        source.device.type == "cpu"
        and source.untyped_storage().nbytes() == source.nbytes
        and not (source.is_conj() or source.is_neg())
    )


def _same_form(kept: Tensor, source: Tensor) -> bool:
    if (kept.shape, kept.dtype) != (source.shape, source.dtype):
        return False
    # a copy of a view with gaps closes them; asking torch how takes longer than copying a small tensor
    return kept.stride() == source.stride() or kept.stride() == torch.empty_like(source, device="meta").stride()

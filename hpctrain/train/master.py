"""Half weights that are computed with, and the fp32 weights that are trained and saved."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class MasterWeights:
    """A copy of a model in half precision, and the way between the two (Micikevicius et al., 2018).

    The model itself keeps the fp32 weights: optimizer, checkpoints and averages work on it, and never know. The copy is
    what forward and backward passes go through. Norms are fp32 in both: they are the same tensors, so nothing has to be
    carried to and fro. Loading a state dict into the model brings the copy up to date; saving one collects the buffers
    that training has changed in the copy.

    Args:
        model: in fp32, on its device and in its layout; tensors of it and of the copy must stay where they are.
        dtype: of the copy.

    Attributes:
        copy: takes fp16 inputs; see `accept_fp32`.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        shared = {id(tensor): tensor for tensor in _kept_in_fp32(model)}
        self.copy = copy.deepcopy(model, dict(shared))
        for parameter in self.copy.parameters():
            if id(parameter) not in shared and parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(dtype)
        for module in self.copy.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in shared and buffer.dtype == torch.float32:
                    module._buffers[name] = buffer.to(dtype)
            if _is_norm(module) and not isinstance(module, nn.modules.batchnorm._BatchNorm):
                # torch's batch norm takes half inputs with fp32 weights, its other norms don't on every device
                _compute_in_fp32(module, dtype)
        parameters = zip(model.parameters(), self.copy.parameters(), strict=True)
        apart = [(master, half) for master, half in parameters if master is not half]
        self._trained = [(master, half) for master, half in apart if master.requires_grad]
        self._masters = [master.detach() for master, _ in self._trained]
        self._halves = [half.detach() for _, half in self._trained]
        self._gradients = [torch.zeros_like(master) for master in self._masters]
        buffers = zip(model.buffers(), self.copy.buffers(), strict=True)
        self._buffers = [(master, half) for master, half in buffers if master is not half]
        self._frozen = [(master.detach(), half.detach()) for master, half in apart if not master.requires_grad]
        model.register_state_dict_pre_hook(self._before_saving)  # type: ignore[no-untyped-call]  # torch leaves both untyped
        model.register_load_state_dict_post_hook(self._after_loading)  # type: ignore[no-untyped-call]  # as above

    def collect_gradients(self) -> None:
        """Move the gradients from the copy to the fp32 weights, in fp32."""
        taken, given = [], []
        for (master, half), gradient in zip(self._trained, self._gradients, strict=True):
            master.grad = None
            if half.grad is not None:
                taken.append(half.grad)
                given.append(gradient)
                master.grad = gradient
                half.grad = None
        if taken:
            torch._foreach_copy_(given, taken)

    def publish(self) -> None:
        """Bring the trained weights of the copy up to date."""
        torch._foreach_copy_(self._halves, self._masters)

    @torch.no_grad()
    def _before_saving(self, *_: Any) -> None:
        for master, half in self._buffers:
            master.copy_(half)

    @torch.no_grad()
    def _after_loading(self, *_: Any) -> None:
        self.publish()
        for master, half in (*self._frozen, *self._buffers):
            half.copy_(master)


def _kept_in_fp32(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        if _is_norm(module):
            yield from module.parameters(recurse=False)
            yield from module.buffers(recurse=False)
    yield from (buffer for buffer in model.buffers() if buffer.dtype != torch.float32)


def _is_norm(module: nn.Module) -> bool:
    """One of torch's norms, or a module of one's own that is called so and has no modules inside."""
    kinds = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    return isinstance(module, kinds) or (type(module).__name__.endswith("Norm") and not any(module.children()))


def _compute_in_fp32(norm: nn.Module, dtype: torch.dtype) -> None:
    def before(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(item.float() if isinstance(item, Tensor) else item for item in arguments)

    def after(_: nn.Module, __: object, output: Tensor) -> Tensor:
        return output.to(dtype)

    norm.register_forward_pre_hook(before)
    norm.register_forward_hook(after)

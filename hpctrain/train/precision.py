"""Number formats: autocast, the loss scale, TF32, and whole models in half precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.config.precision import NumberFormats, Precision
from hpctrain.data.micro_batch import map_tensors

Compute = TypeVar("Compute", bound=Callable[..., Any])


def dtype_of(name: str) -> torch.dtype | None:
    """Return the dtype that a row of `FORMATS` names; None for an empty name."""
    dtype: torch.dtype | None = getattr(torch, name) if name else None
    return dtype


def autocast(formats: NumberFormats, device: torch.device) -> AbstractContextManager[object]:
    """Return the context for a forward pass and its loss, which can be entered repeatedly; empty without autocast."""
    dtype = dtype_of(formats.autocast)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def autocasting(compute: Compute, formats: NumberFormats, device: torch.device) -> Compute:
    """Wrap a function in the autocast of a precision; return the function itself without autocast."""
    # an empty context would cost each step something
    dtype = dtype_of(formats.autocast)
    return compute if dtype is None else torch.autocast(device.type, dtype=dtype)(compute)


def gradient_scaler(
    precision: Precision, device: torch.device, *, is_mixed: bool = False, on_host: bool = False
) -> torch.amp.GradScaler | None:
    """Return the loss scaler; None for a precision without a loss scale.

    Args:
        precision: of the configuration.
        device: of this rank.
        is_mixed: whether an overflow on one rank may be unknown to others that share its model.
        on_host: whether gradients are in host memory, whatever the device.
    """
    if not precision.formats.scales_loss:
        return None
    kind = _SharedScaler if is_mixed else torch.amp.GradScaler
    scaler = kind(
        device.type, init_scale=precision.initial_loss_scale, growth_interval=precision.loss_scale_growth_steps
    )
    if on_host:
        # otherwise the scale would be where the loss is, and torch would read its copy for the host before it arrives
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    return scaler


class _SharedScaler(torch.amp.GradScaler):
    """A scaler of ranks that share parameters in different ways; they skip the same updates."""

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        # torch exchanges overflows over the mesh of the first gradient, which may lack a dimension
        overflows_by_device: dict[torch.device, Tensor] = super()._unscale_grads_(*args, **kwargs)
        for overflows in overflows_by_device.values():
            dist.all_reduce(overflows, op=dist.ReduceOp.MAX)
        return overflows_by_device


def slow_precision_reason(formats: NumberFormats, device: torch.device) -> str | None:
    """Explain why this device gains nothing from the precision; None if it may gain."""
    if device.type == "cpu":
        alternative = formats.on_cpu
        return f"precision={formats.kind} works on a CPU, but slowly: try {alternative}" if alternative else None
    if torch.cuda.get_device_capability(device) >= formats.capability:
        return None
    name = torch.cuda.get_device_name(device)
    return f"{name} has no hardware support for {formats.products}: try precision={formats.on_older_gpus}"


def set_fp32_precision(formats: NumberFormats) -> None:
    """Compute fp32 matrix products, convolutions and recurrent layers in TF32 or in fp32, in the whole process."""
    # By torch's older API for both: its compiler reads that one, and raises an error if the newer one (fp32_precision)
    # has set another value. torch's default allows cuDNN, but not cuBLAS, to compute in TF32.
    in_tf32 = formats.products == "tf32"
    torch.set_float32_matmul_precision("high" if in_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = in_tf32


def compute_in(dtype: torch.dtype, module: nn.Module, *, outer_dtype: torch.dtype) -> None:
    """Have a module whose weights are in ``dtype`` take and return tensors in the format in which its callers compute.

    Args:
        dtype: the format inside.
        module: a whole model, so that task and loss don't depend on its format; or a single norm.
        outer_dtype: the format outside.
    """
    _convert_inputs(module, _cast(outer_dtype, dtype))
    back = _cast(dtype, outer_dtype)
    module.register_forward_hook(lambda _, __, output: map_tensors(back, output))


def order_channels_last(model: nn.Module) -> None:
    """Give the weights of convolutions, and 4-d inputs of the model, the channels-last memory format."""

    def reorder(tensor: Tensor) -> Tensor:
        return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor

    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's annotations lack this form
    _convert_inputs(model, reorder)


def _convert_inputs(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    def before(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return map_tensors(convert, arguments), map_tensors(convert, options)

    module.register_forward_pre_hook(before, with_kwargs=True)


def _cast(source: torch.dtype, target: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(target) if tensor.dtype == source else tensor


class MasterWeights:
    """A half-precision copy of a model for computing, next to the fp32 weights (Micikevicius et al., 2018).

    The model keeps the fp32 weights: optimizer, checkpoints and averages work on it, not on the copy. With half weights
    in the model, as in Apex, the optimizer's state would have no names, checkpoints a second set of weights, and an
    average would lose small updates. An optimizer around the user's couldn't be fused with the copy, and GradScaler
    inspects optimizers.

    Forward and backward passes go through the copy. Both share the tensors of norms, which stay fp32. Loading a state
    dict into the model updates the copy; saving one first fetches the buffers that training has changed in the copy.
    With AdamW this takes 18 to 20 bytes per parameter, and autocast 16: it saves communication and casts, not memory.

    Args:
        model: in fp32, on its device and in its memory format; its tensors and the copy's must stay where they are.
        dtype: of the copy.

    Attributes:
        copy: takes inputs of `dtype`; see `compute_in`.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        shared = {id(tensor): tensor for tensor in _fp32_tensors(model)}
        # what is in the memo isn't copied but shared
        self.copy = copy.deepcopy(model, dict(shared))
        # .data, so that the parameters keep their hooks and ties
        for parameter in self.copy.parameters():
            if id(parameter) not in shared and parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(dtype)
        for module in self.copy.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in shared and buffer.dtype == torch.float32:
                    module._buffers[name] = buffer.to(dtype)
            if _is_norm(module) and not isinstance(module, nn.modules.batchnorm._BatchNorm):
                # torch's batch norm takes half inputs with fp32 weights, its other norms don't on every device
                compute_in(torch.float32, module, outer_dtype=dtype)
        parameters = zip(model.parameters(), self.copy.parameters(), strict=True)
        apart = [(master, half) for master, half in parameters if master is not half]
        self._trained = [(master, half) for master, half in apart if master.requires_grad]
        self._masters = [master.detach() for master, _ in self._trained]
        self._halves = [half.detach() for _, half in self._trained]
        self._gradients = [torch.zeros_like(master) for master in self._masters]
        self._dtype = dtype
        self._frozen = [(master.detach(), half.detach()) for master, half in apart if not master.requires_grad]
        self._modules = [*zip(model.modules(), self.copy.modules(), strict=True)]
        self._modes = [half.training for _, half in self._modules]
        model.register_state_dict_pre_hook(self._before_saving)  # type: ignore[no-untyped-call]  # torch leaves both untyped
        model.register_load_state_dict_post_hook(self._after_loading)  # type: ignore[no-untyped-call]  # as above

    def begin_step(self) -> None:
        """Copy the half copy's modes to the model, so that `end_step` sees which ones the task's loss changed."""
        # setting a module's attribute is slow, and its mode is almost never another one
        for module, half in self._modules:
            if module.training != half.training:
                module.training = half.training
        self._modes = [half.training for _, half in self._modules]

    def end_step(self) -> None:
        """Apply to the half copy the mode changes made in the model since `begin_step`.

        A task that freezes or unfreezes modules knows those that it built, and not the copy.
        """
        for (module, half), mode in zip(self._modules, self._modes, strict=True):
            if module.training != mode:
                half.training = module.training

    def collect_gradients(self) -> None:
        """Move the gradients from the copy to the fp32 weights, in fp32, which GradScaler and clipping require.

        Before that they are in half precision, also while ranks exchange them and micro-batches add them up.
        """
        sources, targets = [], []
        for (master, half), gradient in zip(self._trained, self._gradients, strict=True):
            master.grad = None
            if half.grad is not None:
                sources.append(half.grad)
                targets.append(gradient)
                master.grad = gradient
                half.grad = None
        if sources:
            torch._foreach_copy_(targets, sources)

    def publish(self) -> None:
        """Write the trained weights into the copy."""
        torch._foreach_copy_(self._halves, self._masters)

    @torch.no_grad()
    def _before_saving(self, *_: Any) -> None:
        for module, half in self._modules:
            _copy_buffers(half, module, {self._dtype: torch.float32})

    @torch.no_grad()
    def _after_loading(self, *_: Any) -> None:
        self.publish()
        for master, half in self._frozen:
            half.copy_(master)
        for module, half_module in self._modules:
            _copy_buffers(module, half_module, {} if _is_norm(module) else {torch.float32: self._dtype})


def _copy_buffers(source: nn.Module, target: nn.Module, formats: Mapping[torch.dtype, torch.dtype]) -> None:
    """Copy a module's own buffers: a forward pass may have replaced, added or removed some.

    Args:
        source: has them.
        target: gets them.
        formats: the dtype of a copy by that of the original, where it is another one.
    """
    for name in target._buffers.keys() - source._buffers.keys():
        del target._buffers[name]
    for name, buffer in source._buffers.items():
        old = target._buffers.get(name)
        if buffer is None or old is buffer:
            target._buffers[name] = buffer
        elif old is None or old.shape != buffer.shape or old.dtype != formats.get(buffer.dtype, buffer.dtype):
            target._buffers[name] = buffer.to(formats.get(buffer.dtype, buffer.dtype), copy=True)
        else:
            old.copy_(buffer)


def _fp32_tensors(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        if _is_norm(module):
            yield from module.parameters(recurse=False)
            yield from module.buffers(recurse=False)
    yield from (buffer for buffer in model.buffers() if buffer.dtype != torch.float32)


def _is_norm(module: nn.Module) -> bool:
    """Whether the module is one of torch's norms, or a user's module without children whose name ends in Norm."""
    kinds = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    return isinstance(module, kinds) or (type(module).__name__.endswith("Norm") and not any(module.children()))

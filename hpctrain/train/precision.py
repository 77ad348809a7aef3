"""Number formats: autocast, the loss scale, matrix products, and models in half precision as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.config.precision import Precision
from hpctrain.data.tree import map_tensors

AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PURE_TYPES = {"bf16_pure": torch.bfloat16}
"""Kinds in which all of the model, and the optimizer's state with it, is in one format."""
MASTER_TYPES = {"fp16_master": torch.float16}
"""Kinds in which a copy of the model is, while the optimizer works on the fp32 weights."""
SCALED = ("fp16", "fp16_master")
AMPERE = (8, 0)
"""NVIDIA's first compute capability with bf16 and TF32."""


def autocast(kind: str, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass and its loss, to be entered any number of times; nothing without autocast."""
    dtype = AUTOCAST_TYPES.get(kind)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def gradient_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler | None:
    """The scaler without which small gradients vanish in fp16; None elsewhere."""
    if precision.kind not in SCALED:
        return None
    return torch.amp.GradScaler(
        device.type, init_scale=precision.initial_loss_scale, growth_interval=precision.loss_scale_growth_steps
    )


def poor_fit(kind: str, device: torch.device) -> str | None:
    """Why this device gains nothing from the kind; None where it may."""
    if device.type == "cpu":
        return f"precision={kind} works on a CPU, but slowly: try bf16" if kind in SCALED else None
    name, before_ampere = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device) < AMPERE
    if before_ampere and (kind == "tf32" or kind.startswith("bf16")):
        return f"{name} has no {kind.partition('_')[0]} of its own: try precision=fp16"
    return None


def choose_matmul_precision(kind: str) -> None:
    """TF32 in fp32's matrix products, for the whole process, or torch's default."""
    wanted = "high" if kind == "tf32" else "highest"
    if torch.get_float32_matmul_precision() != wanted:
        torch.set_float32_matmul_precision(wanted)


def accept_fp32(model: nn.Module, dtype: torch.dtype) -> None:
    """Let a model in another format take fp32 tensors and give fp32 ones, so that neither task nor loss need know."""

    def lower(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return _cast(arguments, torch.float32, dtype), _cast(options, torch.float32, dtype)

    def raise_(_: nn.Module, __: object, output: Any) -> Any:
        return _cast(output, dtype, torch.float32)

    model.register_forward_pre_hook(lower, with_kwargs=True)
    model.register_forward_hook(raise_)


def order_channels_last(model: nn.Module) -> None:
    """Give convolutions' weights, and the pictures that the model is called with, the channels-last layout."""

    def reorder(tensor: Tensor) -> Tensor:
        return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor

    def before(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return map_tensors(reorder, arguments), map_tensors(reorder, options)

    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's annotations lack this form
    model.register_forward_pre_hook(before, with_kwargs=True)


def _cast(tree: Any, source: torch.dtype, target: torch.dtype) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(target) if tensor.dtype == source else tensor

    if isinstance(tree, Mapping) and not tree:
        return tree
    return map_tensors(cast, tree)

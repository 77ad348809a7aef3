"""Floating-point operations: how many a step does, and how many a device could do."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Formula = Callable[..., int]

log = logging.getLogger("hpctrain.train")

_HALF, _TF32, _FP32 = 0, 1, 2
PEAKS: tuple[tuple[str, tuple[float, float | None, float]], ...] = (
    ("B200", (2250.0, 1125.0, 75.0)),
    ("GH200", (989.4, 494.7, 66.9)),
    ("H200", (989.4, 494.7, 66.9)),
    ("H100 NVL", (835.5, 417.5, 60.0)),
    ("H100 PCIe", (756.5, 378.0, 51.2)),
    ("H100", (989.4, 494.7, 66.9)),
    ("A100", (311.9, 155.9, 19.5)),
    ("A40", (149.7, 74.8, 37.4)),
    ("A10", (124.9, 62.4, 31.2)),
    ("L40S", (362.1, 183.2, 91.6)),
    ("L4", (121.0, 60.2, 30.3)),
    ("RTX A6000", (154.8, 77.4, 38.7)),
    ("RTX 4090", (165.2, 82.6, 82.6)),
    ("RTX 3090", (71.2, 35.6, 35.6)),
    ("V100", (125.0, None, 15.7)),
    ("T4", (65.1, None, 8.1)),
    ("MI300X", (1307.4, 653.7, 163.4)),
)
"""Dense peaks in TFLOP/s, by words of the device's name: half precision accumulated in fp32 (bf16; fp16 on V100 and
T4), TF32 (None: the device has none), fp32 without tensor cores. The first that fits counts.

From the makers' data sheets, where those give figures with structured sparsity by half of them: NVIDIA's for DGX B200,
H100, H200, GH200, A100, A40, A10, L40S, L4, V100 and T4; the RTX A6000, GA102 and Ada white papers; AMD's for MI300X.
"""


def peak_flops(name: str, precision: str) -> float | None:
    """What a device could do at most, FLOP/s; None where it isn't known.

    Args:
        name: as `torch.cuda.get_device_name` gives it.
        precision: `fp32`, `tf32`, or one of half precision.
    """
    kind = {"fp32": _FP32, "tf32": _TF32}.get(precision, _HALF)
    for part, peaks in PEAKS:
        if re.search(rf"\b{part}\b", name):
            peak = peaks[kind]
            return None if peak is None else peak * 1e12
    return None


class FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Inside, the floating-point operations of matrix products, convolutions and attention are counted.

    The formulas are those of `torch.utils.flop_counter`, a multiplication and an addition being two; attention on the
    CPU is added, causal attention counts in full. What is computed again, by activation checkpointing, counts again.
    What has no formula doesn't count, nor does what is inside of torch.cond and its like. Every operator runs as it
    would without, and counting raises nothing.

    Attributes:
        total: so far; None once a formula failed.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.total: int | None = 0
        self._formulas = _formulas()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap the handler so that its compiler passes over it, and import the compiler: more than a second
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Have what the compiler is asked for compiled, as it would be without."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and count."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = self._formulas.get(getattr(func, "_overloadpacket", func))
        if formula is not None and self.total is not None:
            try:
                self.total += formula(*args, **kwargs, out_val=result)
            except Exception as error:  # whatever torch's formulas make of these tensors, it isn't worth the step
                self.total = None
                log.info("FLOPs are not counted: torch's formula for %s fails: %s", func, error)
        return result


def _formulas() -> dict[Any, Formula]:
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        shapes = gradient.shape, query.shape, key.shape, value.shape
        return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]  # torch leaves it untyped

    aten = torch.ops.aten
    return {
        **flop_registry,
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    }


def flops_text(flops_per_sample: float, global_batch_size: int) -> str:
    """``1.3 TFLOP per step, 20.2 GFLOP per sample, forward and backward``."""
    step, sample = (_scaled(flops) for flops in (flops_per_sample * global_batch_size, flops_per_sample))
    return f"{step} per step, {sample} per sample, forward and backward"


def _scaled(flops: float) -> str:
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if flops >= size:
            return f"{flops / size:.3g} {prefix}FLOP"
    return f"{flops:.0f} FLOP"

"""``conf/precision``: the number formats of weights, gradients and operations. Owner: hpctrain.train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hpctrain.config import require


@dataclass(frozen=True, slots=True)
class NumberFormats:
    """The number formats of one precision, and the precisions to use where this one is slow or doesn't work.

    Dtypes are torch's, by name: the login half doesn't import torch. An empty name stands for fp32, or for none.

    Attributes:
        kind: the precision.
        products: the format of matrix products: `fp32`, `tf32`, `bf16` or `fp16`.
        autocast: the dtype to which torch.autocast casts; empty without autocast.
        model: the dtype of the whole model, and so of the optimizer's state.
        copy: the dtype of a copy of the model that computes, while the optimizer works on the fp32 weights; empty
            without a copy.
        scales_loss: whether the loss is scaled: small gradients vanish in fp16.
        faster: the precision that is faster and takes less memory.
        by_autocast: the precision with the same products by autocast, for what needs weights in fp32.
        without_nvidia: the precision to use without NVIDIA GPUs, which this one needs.
        on_cpu: the precision to use on a CPU, where this one is slow.
        capability: the first compute capability of NVIDIA GPUs with hardware for the products.
        on_older_gpus: the precision to use below that capability.
    """

    kind: str
    products: str
    autocast: str = ""
    model: str = ""
    copy: str = ""
    scales_loss: bool = False
    faster: str = ""
    by_autocast: str = ""
    without_nvidia: str = ""
    on_cpu: str = ""
    capability: tuple[int, int] = (0, 0)
    on_older_gpus: str = "fp16"

    @property
    def has_half_weights(self) -> bool:
        """Whether forward passes use weights in half precision, which have gradients in half precision."""
        return bool(self.model or self.copy)


_AMPERE = (8, 0)

FORMATS = {
    formats.kind: formats
    for formats in (
        NumberFormats("fp32", "fp32", faster="bf16"),
        NumberFormats("tf32", "tf32", faster="bf16", without_nvidia="fp32", capability=_AMPERE),
        NumberFormats("bf16", "bf16", autocast="bfloat16", capability=_AMPERE),
        NumberFormats("fp16", "fp16", autocast="float16", scales_loss=True, on_cpu="bf16"),
        NumberFormats("bf16_pure", "bf16", model="bfloat16", by_autocast="bf16", capability=_AMPERE),
        NumberFormats("fp16_master", "fp16", copy="float16", scales_loss=True, by_autocast="fp16", on_cpu="bf16"),
    )
}
"""The precisions, by name. A new one is a row here, and a file of its name in ``conf/precision``."""


@dataclass(kw_only=True, slots=True)
class Precision(require.Checked):
    """One of six kinds; checkpoints contain fp32 weights with all but `bf16_pure`."""

    kind: Annotated[str, require.one_of(*FORMATS)] = "fp32"
    """`fp32`; `tf32`: fp32 with TF32 matrix products, GPUs only; `bf16`: autocast; `fp16`: autocast with a GradScaler;
    `bf16_pure`: the whole model in bf16; `fp16_master`: the model in fp16 with its norms in fp32, an fp32 master copy
    of the weights, and a GradScaler."""
    # this and the next default are those of torch.amp.GradScaler
    initial_loss_scale: Annotated[float, require.above(0)] = 65536.0
    """Initial loss scale, for fp16 and fp16_master."""
    loss_scale_growth_steps: Annotated[int, require.at_least(1)] = 2000
    """Steps without an overflow after which the loss scale doubles."""
    min_loss_scale: Annotated[float, require.at_least(0)] = 1.0
    """The run fails if overflows halve the loss scale below this."""

    @property
    def formats(self) -> NumberFormats:
        """The row of the table for `kind`."""
        return FORMATS[self.kind]

"""``conf/precision``: the number formats of weights, gradients and operations. Owner: hpctrain.train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hpctrain.config import require


@dataclass(frozen=True, slots=True)
class NumberFormats:
    """The number formats of one precision, and the precisions to suggest if this one is slow or doesn't work.

    Dtypes are names of torch's, since the login half doesn't import torch. An empty `model` is fp32; an empty `copy`
    or `autocast` means that there is none.

    Attributes:
        kind: the name of the precision.
        products: the format of matrix products: `fp32`, `tf32`, `bf16` or `fp16`.
        autocast: the dtype to which torch.autocast casts.
        model: the dtype of the whole model, and so of the optimizer's state.
        copy: the dtype of a second copy of the model, which computes while the optimizer works on the fp32 weights.
        scales_loss: whether the loss is scaled: small gradients vanish in fp16.
        faster: a precision that is faster and takes less memory; empty without one.
        by_autocast: the precision with the same products, but fp32 weights and autocast; empty if its weights are fp32.
        without_nvidia: the precision to use without NVIDIA GPUs, if this one needs them.
        on_cpu: the precision to use on a CPU, if this one is slow there.
        capability: the lowest compute capability of NVIDIA GPUs that compute the products in hardware.
        on_older_gpus: the precision to use on GPUs below that capability.
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
        """Whether the model computes with half-precision weights, and so has half-precision gradients."""
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
"""The precisions, by name. A new one is a row here, and a file of its name in ``conf/precision``.

If it computes in a new way, `train.precision` and `train.build` have to do so, and new `products` need an
entry of `_COLUMNS`, and a column of `PEAKS`, in `train.profiling.flops`.
"""


@dataclass(kw_only=True, slots=True)
class Precision(require.Checked):
    """A row of `FORMATS`, with the loss scale; checkpoints contain fp32 weights with all but `bf16_pure`."""

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
        """The row of `FORMATS` for `kind`."""
        return FORMATS[self.kind]

"""``conf/precision``: the number formats of weights, gradients and operations. Owner: hpctrain.train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hpctrain.config import require

KINDS = ("fp32", "tf32", "bf16", "fp16", "bf16_pure", "fp16_master")


@dataclass(kw_only=True, slots=True)
class Precision(require.Checked):
    """One of six kinds; checkpoints contain fp32 weights with all but `bf16_pure`."""

    kind: Annotated[str, require.one_of(*KINDS)] = "fp32"
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

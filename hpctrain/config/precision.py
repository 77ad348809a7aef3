"""``conf/precision``: the number formats of weights, gradients and operations. Owner: hpctrain.train."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config import require

KINDS = ("fp32", "tf32", "bf16", "fp16", "bf16_pure", "fp16_master")


@dataclass(kw_only=True, slots=True)
class Precision:
    """One of six kinds; checkpoints contain fp32 weights with all but `bf16_pure`."""

    kind: str = "fp32"
    """`fp32`; `tf32`: fp32 with TF32 matrix products, GPUs only; `bf16`: autocast; `fp16`: autocast with a GradScaler;
    `bf16_pure`: the whole model in bf16; `fp16_master`: the model in fp16 with its norms in fp32, an fp32 master copy
    of the weights, and a GradScaler."""
    initial_loss_scale: float = 65536.0
    """Initial loss scale, for fp16 and fp16_master."""
    loss_scale_growth_steps: int = 2000
    """Steps without an overflow after which the loss scale doubles."""
    min_loss_scale: float = 1.0
    """The run fails if overflows halve the loss scale below this."""

    def __post_init__(self) -> None:
        """Check single values."""
        require.one_of("precision.kind", self.kind, KINDS)
        require.above("precision.initial_loss_scale", self.initial_loss_scale, 0)
        require.at_least("precision.loss_scale_growth_steps", self.loss_scale_growth_steps, 1)
        require.at_least("precision.min_loss_scale", self.min_loss_scale, 0)

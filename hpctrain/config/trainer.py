"""``conf/trainer``: how long, how large, how often. Owner: hpctrain.train."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpctrain.config import require
from hpctrain.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class Trainer:
    """The loop's arithmetic; accumulation is derived: global / (micro x world size)."""

    max_steps: int | None = None
    """Optimizer updates after which the run ends; null: no bound."""
    max_epochs: int | None = 10
    """Passes over the training data after which the run ends; null: no bound. Whichever comes first."""
    global_batch_size: int = 64
    """Samples per optimizer update, over all ranks."""
    micro_batch_size: int | None = None
    """Samples per rank and forward; null: global_batch_size / world size, without accumulation."""
    eval_every_steps: int | None = None
    """Steps between evaluations; null: at the end of each epoch. The last step is always evaluated."""
    clip_grad_norm: float | None = None
    """Largest 2-norm of all gradients together; null: no clipping. The norm before is logged as train/grad_norm."""
    clip_grad_value: float | None = None
    """Largest absolute value of any gradient, after clip_grad_norm; null: no clipping."""
    log_grad_norm: bool = False
    """Log train/grad_norm without clipping too, at the price of computing it in each step."""
    ema_decay: float | None = None
    """Share of the weights' moving average that stays at each step, such as 0.999; null: no average is kept."""
    eval_ema: bool = True
    """Evaluate the averaged weights, where they are kept, instead of the live ones."""
    sync_batchnorm: bool = False
    """Batch norm over all ranks' samples instead of each rank's own; GPUs only."""
    deterministic: bool = False
    """Deterministic algorithms only: bit-equal runs on CUDA too, at a cost in speed."""
    compile: bool = False
    """torch.compile of the model, before DDP; the first steps take long."""
    compile_mode: str = "default"
    """`default`, `reduce-overhead` or `max-autotune`, as torch.compile has them."""
    channels_last: bool = False
    """Keep pictures and convolutions' weights with their channels last, which tensor cores want."""
    profile: list[int] | None = None
    """First and last step of which rank zero writes a trace by torch's profiler, such as [10,15]; null: none."""
    activation_checkpointing: list[str] = field(default_factory=list)
    """Modules by name, such as blocks.*, that forget what is inside and compute it again in the backward pass: less
    memory, about a third more computing; * and ? stand for parts of one name between dots."""

    def __post_init__(self) -> None:
        """Check single values."""
        require.at_least("trainer.max_steps", self.max_steps, 1)
        require.at_least("trainer.max_epochs", self.max_epochs, 1)
        require.at_least("trainer.global_batch_size", self.global_batch_size, 1)
        require.at_least("trainer.micro_batch_size", self.micro_batch_size, 1)
        require.at_least("trainer.eval_every_steps", self.eval_every_steps, 1)
        require.above("trainer.clip_grad_norm", self.clip_grad_norm, 0)
        require.above("trainer.clip_grad_value", self.clip_grad_value, 0)
        require.one_of("trainer.compile_mode", self.compile_mode, ("default", "reduce-overhead", "max-autotune"))
        if self.compile_mode != "default" and not self.compile:
            raise ConfigError("trainer.compile_mode", self.compile_mode, "compiles nothing", "add trainer.compile=true")
        if self.profile is not None and not (len(self.profile) == 2 and 1 <= self.profile[0] <= self.profile[1]):
            problem = "must be the first and the last step of the trace, counted from 1"
            raise ConfigError("trainer.profile", self.profile, problem, "write trainer.profile=[10,15]")
        if self.ema_decay is not None:
            require.between("trainer.ema_decay", self.ema_decay, 0, 0.999999)

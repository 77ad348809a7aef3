"""``conf/trainer``: how long, how large, how often. Owner: hpctrain.train."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpctrain.config import require
from hpctrain.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class Trainer:
    """The training loop; accumulation is derived: global / (micro x world size)."""

    max_steps: int | None = None
    """Optimizer updates after which the run ends; null: no limit."""
    max_epochs: int | None = 10
    """Passes over the training data after which the run ends; null: no limit. Whichever comes first."""
    global_batch_size: int = 64
    """Samples per optimizer update, over all ranks."""
    micro_batch_size: int | None = None
    """Samples per rank and forward pass; null: global_batch_size / world size, without accumulation."""
    eval_every_steps: int | None = None
    """Steps between evaluations; null: at the end of each epoch. The last step is always evaluated."""
    clip_grad_norm: float | None = None
    """Largest 2-norm of all gradients together; null: no clipping. train/grad_norm logs the norm before clipping."""
    clip_grad_value: float | None = None
    """Largest absolute value of any gradient, after clip_grad_norm; null: no clipping."""
    log_grad_norm: bool = False
    """Log train/grad_norm without clipping too; computed in each step."""
    ema_decay: float | None = None
    """Decay of the weights' exponential moving average, such as 0.999; null: no average."""
    eval_ema: bool = True
    """Evaluate the averaged weights, if there are any, instead of the current ones."""
    sync_batchnorm: bool = False
    """Batch norm over the samples of all ranks instead of each rank's own; GPUs only."""
    deterministic: bool = False
    """Use deterministic algorithms only: bit-identical runs on CUDA too, but slower."""
    compile: bool = False
    """Compile the model with torch.compile, before DDP; the first steps take long."""
    compile_mode: str = "default"
    """`default`, `reduce-overhead` or `max-autotune`, as torch.compile has them."""
    channels_last: bool = False
    """Store images and convolution weights channels-last, which tensor cores prefer."""
    profile: list[int] | None = None
    """First and last step of a trace by torch's profiler on rank zero, such as [10,15]; null: none."""
    activation_checkpointing: list[str] = field(default_factory=list)
    """Modules whose activations are recomputed in the backward pass, by name, such as blocks.*: less memory, a third
    more compute. * and ? match within one part of the name, between dots."""

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
            raise ConfigError(
                "trainer.compile_mode",
                self.compile_mode,
                "compiles nothing",
                "add trainer.compile=true",
            )
        if self.profile is not None and not (len(self.profile) == 2 and 1 <= self.profile[0] <= self.profile[1]):
            problem = "must be the first and the last step of the trace, counted from 1"
            raise ConfigError("trainer.profile", self.profile, problem, "write trainer.profile=[10,15]")
        if self.ema_decay is not None:
            require.between("trainer.ema_decay", self.ema_decay, 0, 0.999999)

"""``conf/trainer``: how long, how large, how often. Owner: hpctrain.train."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from hpctrain.config import require
from hpctrain.errors import ConfigError

TRACE = require.that(
    lambda steps: len(steps) == 2 and 1 <= steps[0] <= steps[1],
    "must be the first and the last step of the trace, counted from 1",
    "write {key}=[10,15]",
)


@dataclass(kw_only=True, slots=True)
class Trainer(require.Checked):
    """The training loop; accumulation is derived: global / (micro x world size)."""

    max_steps: Annotated[int | None, require.at_least(1)] = None
    """Optimizer updates after which the run ends; null: no limit."""
    max_epochs: Annotated[int | None, require.at_least(1)] = 10
    """Passes over the training data after which the run ends; null: no limit. Whichever comes first."""
    max_time_min: Annotated[float | None, require.above(0)] = None
    """Minutes of training, including evaluations and saves, over all attempts, after which the run ends as completed;
    null: no limit. It doesn't shorten the schedule."""
    pause_at_step: Annotated[int | None, require.at_least(1)] = None
    """Save, and pause the run, after the first evaluation at or after this step; without evaluations, after this step.
    The run can be resumed, and then doesn't pause there again; null: no pause. It shortens neither run nor schedule."""
    global_batch_size: Annotated[int, require.at_least(1)] = 64
    """Samples per optimizer update, over all ranks."""
    micro_batch_size: Annotated[int | None, require.at_least(1)] = None
    """Samples per rank and forward pass; null: global_batch_size / world size, without accumulation. With a pipeline,
    null: that share, cut into at least 4 x `parallel.pipeline_degree` equal micro-batches, of one sample each if it is
    smaller."""
    eval_every_steps: Annotated[int | None, require.at_least(1)] = None
    """Steps between evaluations; null: at the end of each epoch. The last step is always evaluated."""
    sanity_batches: Annotated[int, require.at_least(0)] = 2
    """Micro-batches that each rank evaluates before the first step of a new run, or of a resume that changes the
    configuration, to show a mistake in the evaluation at once; training isn't affected. 0: none."""
    max_gathered_mb: Annotated[int, require.at_least(1)] = 1024
    """Limit, in MB of host memory on rank zero, for what one evaluation gathers: values per sample (`PerSample`), and
    states of metrics that keep every sample. A run that would exceed it is refused, if possible before step 1."""
    clip_grad_norm: Annotated[float | None, require.above(0)] = None
    """Largest 2-norm of all gradients together; null: no clipping. train/grad_norm logs the norm before clipping."""
    clip_grad_value: Annotated[float | None, require.above(0)] = None
    """Largest absolute value of any gradient, after clip_grad_norm; null: no clipping."""
    log_grad_norm: bool = False
    """Log train/grad_norm without clipping too; computed in each step."""
    # below 1: with a decay of 1 the average would keep its first weights for ever
    ema_decay: Annotated[float | None, require.between(0, 0.999999)] = None
    """Decay of the weights' exponential moving average, such as 0.999; null: no average."""
    eval_ema: bool = True
    """Evaluate the averaged weights, if there are any, instead of the current ones."""
    sync_batchnorm: bool = False
    """Batch norm over the samples of all ranks instead of each rank's own; GPUs only."""
    deterministic: bool = False
    """Use deterministic algorithms only, for bit-identical runs on CUDA too; slower. With three or more GPUs, runs are
    identical on the same node layout only."""
    cudnn_benchmark: bool = False
    """Let cuDNN time its algorithms for each new shape of a convolution, and use the fastest; CUDA only. Helps if all
    batches have the same shape. Not with deterministic: a resumed run may get other algorithms."""
    compile: bool = False
    """Compile the model with torch.compile, before DDP; the first steps take long."""
    compile_mode: Annotated[str, require.one_of("default", "reduce-overhead", "max-autotune")] = "default"
    """`default`, `reduce-overhead` or `max-autotune`, as torch.compile has them; the last two use CUDA graphs, and
    allow only one micro-batch per step."""
    channels_last: bool = False
    """Store images and convolution weights channels-last, which tensor cores prefer."""
    profile: Annotated[list[int] | None, TRACE] = None
    """First and last step of a trace by torch's profiler on rank zero, such as [10,15]; null: none."""
    progress: Annotated[str, require.one_of("auto", "bar", "lines")] = "auto"
    """Progress on standard output: `lines`, at most one a second; `bar`, one line that is redrawn; `auto`: a bar if the
    output is a terminal, and TERM isn't dumb. Log files always have lines."""
    activation_checkpointing: list[str] = field(default_factory=list)
    """Modules whose activations are recomputed in the backward pass, by name, such as blocks.*: less memory, a third
    more compute. * and ? match within one part of the name, between dots."""

    def __post_init__(self) -> None:
        """Also refuse a compile mode without `compile`, and a choice of algorithms by timing in a deterministic run."""
        require.Checked.__post_init__(self)
        if self.cudnn_benchmark and self.deterministic:
            problem = "chooses algorithms by timing them, which trainer.deterministic=true rules out"
            raise ConfigError("trainer.cudnn_benchmark", True, problem, "set one of the two to false")
        if self.compile_mode != "default" and not self.compile:
            remedy = "add trainer.compile=true"
            raise ConfigError("trainer.compile_mode", self.compile_mode, "compiles nothing", remedy)

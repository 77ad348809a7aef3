"""The training as a callback sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hpctrain.config.root import Config

if TYPE_CHECKING:
    from hpctrain.tasks.log import TaskLog
    from hpctrain.tasks.position import Position
    from hpctrain.tasks.task import Task


class Training(ABC):
    """The training that a callback watches; the same object in every hook.

    Attributes:
        task: what is trained.
        model: without its DDP wrapper, for forward passes; with `precision=fp16_master` the fp16 copy.
        position: step, epoch and progress.
        log: logs scalars and media, as `eval/NAME` in `after_evaluation` and as `train/NAME` in all other hooks. In
            `before_step` and `after_backward` they belong to the step that is being computed, otherwise to the last
            completed step. A scalar is the mean over all calls and ranks: of one evaluation in `after_evaluation`,
            otherwise since the previous record. In `on_start`, `after_save`, `on_stop` and `on_end` a call is an error:
            these hooks belong to no step, so the records would depend on the run's interruptions.
        config: of the run.
        is_sharded: whether the ranks share the model (`parallel=mesh`). Then every rank has to call the model, inside
            `evaluation_mode`, and weights and gradients are DTensors, each rank's with its own part.
        rank: of this process.
        world_size: number of ranks.
        device: of this rank, the first one if it has several.
        run_dir: the run directory.
        callback_name: the callback whose hook is running, by its name in the configuration, such as `slow_steps`.
        metric: name of the metric that ranks evaluations: `checkpoint.metric`, or by default the task's `metric`.
        metric_mode: `min` or `max`; None if neither the configuration nor the task defines it.
    """

    task: Task
    model: nn.Module
    position: Position
    log: TaskLog
    config: Config
    is_sharded: bool
    rank: int
    world_size: int
    device: torch.device
    run_dir: Path
    callback_name: str
    metric: str
    metric_mode: str | None

    @property
    def takes_part(self) -> bool:
        """Whether this rank should call the model or read its weights.

        Always on rank zero; on every rank if the ranks share the model.
        """
        return self.rank == 0 or self.is_sharded

    @property
    @abstractmethod
    def loss_scale(self) -> float:
        """The factor of the gradients in `after_backward`; 1 unless the precision is fp16. Waits for the device."""

    @property
    @abstractmethod
    def parameters(self) -> dict[str, nn.Parameter]:
        """The weights that are trained, by the names that a checkpoint has; in `after_backward` with gradients."""

    @abstractmethod
    def eval_samples(self, number: int) -> Any | None:
        """Return the first held-out samples as a batch, on the device; not collective.

        Args:
            number: of samples, at most.

        Returns:
            The batch; None if the task holds no samples out.
        """

    @abstractmethod
    def evaluation_mode(self) -> AbstractContextManager[None]:
        """Make passes in this context as an evaluation does; it leaves no trace. Collective if the model is sharded.

        The model is in evaluation mode, with the averaged weights if they are evaluated, without gradients, and in the
        run's precision. Buffers, modes and random states are restored.
        """

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Return the weights and buffers by the names that a checkpoint has, not copied."""

    @abstractmethod
    def end(self, reason: str) -> None:
        """End the run after this step: it is evaluated, saved and `completed`. Rank zero's first call counts.

        From `after_evaluation`, all ranks end at this very step, also in a run that was interrupted. From other hooks,
        runs with several ranks continue for some steps, up to about a second.

        Args:
            reason: in one line, for `status`, the log and the records.
        """

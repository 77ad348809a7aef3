"""The pass of an evaluation over one batch, through a model of this rank or one that the ranks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from hpctrain.data.eval_loader import EvalLoader
from hpctrain.data.micro_batch import map_tensors, shapes_of
from hpctrain.distributed.determinism import random_states_restored
from hpctrain.distributed.local_part import whole
from hpctrain.distributed.world import World
from hpctrain.tasks.task import Task
from hpctrain.train.task_log import AttachedLog
from hpctrain.train.task_metrics import TaskMetrics
from hpctrain.train.task_state import TaskState

if TYPE_CHECKING:
    # importing it imports torch's DTensor, which takes half a second
    from hpctrain.distributed.pipeline.pipeline import Pipeline


class EvaluationPass:
    """Has the task evaluate a batch.

    Args:
        task: gives sums and counts.
        model: the module itself.
        sharded: what to call where the ranks of a mesh share the model, which is collective; None otherwise.
        world: the ranks.
        pipeline: this rank's part in a pipeline; None without one.
        task_state: of the task.
        task_log: of the task.
        metrics: of the task.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        sharded: Callable[..., Any] | None,
        world: World,
        *,
        task_state: TaskState,
        task_log: AttachedLog,
        metrics: TaskMetrics,
        pipeline: Pipeline | None = None,
    ) -> None:
        self._task = task
        self._model = model
        self._sharded = sharded
        self._world = world
        self._task_state = task_state
        self._task_log = task_log
        self._metrics = metrics
        self._pipeline = pipeline

    def __call__(self, batch: Any, number: int) -> Mapping[str, Any] | None:
        """Return what the task's `evaluate` returns for a batch; None where a pipeline returns it to other ranks.

        Args:
            batch: on the CPU.
            number: of the batch in this evaluation.
        """
        device, evaluate = self._world.device, self._task.evaluate
        moved = batch if device.type == "cpu" else self._task.to_device(batch, device)
        if self._sharded is None:
            return evaluate(self._model, moved)
        if self._world.tensor_size > 1:
            # with a model that divides its outputs among ranks, results are DTensors
            evaluate = partial(_whole_results, evaluate)
        found: Mapping[str, Any] | None
        if self._pipeline is None:
            found = self._sharded(lambda model: evaluate(model, moved))
            return found
        with nullcontext() if self._pipeline.stages.is_last else self._task_log.discarding():
            # numbers that no step has: what the task draws is the same in each evaluation
            found = self._pipeline.evaluate(lambda model: evaluate(model, moved), shapes_of(batch), -1 - number)
        return found

    def join(self, loader: EvalLoader) -> None:
        """Take part in the passes of the other ranks, in a round in which this rank has no batch; leaves no trace.

        A pass through a sharded model gathers its weights from all ranks of a replica.

        Args:
            loader: of the evaluation.
        """
        if self._sharded is None or (stand_in := loader.stand_in()) is None:
            return
        with (
            self._task_log.discarding(),
            self._task_state.restored(),
            random_states_restored(self._world.gpus),
            self._metrics.restored(),
        ):
            self(stand_in, 0)


def _whole_results(evaluate: Callable[..., Mapping[str, Any]], model: nn.Module, batch: Any) -> Any:
    return map_tensors(whole, evaluate(model, batch))

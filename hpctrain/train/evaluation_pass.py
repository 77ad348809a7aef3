"""The pass of an evaluation over one batch, through a model of this rank or one that the ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from hpctrain.data.eval_loader import EvalLoader
from hpctrain.data.micro_batch import MOST_MICRO_BATCHES, map_tensors, shapes_of
from hpctrain.data.transfer import MoveOnDemand
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
    from hpctrain.distributed.pipeline.stages import Stages


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
        self._transfer = MoveOnDemand(task.to_device, world.device)

    def __call__(self, batch: Any, number: int) -> Any:
        """Return what the task's `evaluate` returns for a batch, unchecked; None if `is_elsewhere`.

        Args:
            batch: on the CPU.
            number: of the batch in this evaluation.
        """
        if self._pipeline is not None:
            return self._in_pipeline(self._pipeline, batch, number)
        evaluate, moved = self._evaluate, self._moved(batch)
        if self._sharded is None:
            return evaluate(self._model, moved)
        if self._world.tensor_size > 1:
            # with a model that divides its outputs among ranks, results are DTensors
            evaluate = partial(_whole_results, evaluate)
        return self._sharded(lambda model: evaluate(model, moved))

    @property
    def is_elsewhere(self) -> bool:
        """Whether only other ranks of a pipeline get the results."""
        return self._pipeline is not None and not self._pipeline.stages.is_last

    def loading(self, number: int) -> AbstractContextManager[object]:
        """Return the context in which a batch is loaded: in a pipeline, what that draws is the same on all ranks."""
        if self._pipeline is None:
            return nullcontext()
        return self._pipeline.streams.of_task(-MOST_MICRO_BATCHES - number)

    def _evaluate(self, model: nn.Module, batch: Any) -> Any:
        returned = self._task.evaluate(model, batch)
        # at once: sharded weights are gathered for this call only, and averaged weights are swapped out again
        self._metrics.copy_shared(model)
        return returned

    def _in_pipeline(self, pipeline: Pipeline, batch: Any, number: int) -> Any:
        evaluate: Callable[..., Any] = self._evaluate
        if self._world.tensor_size > 1:
            evaluate = partial(_whole_results, evaluate)
        # a number that no step has: what the task draws is the same in each evaluation
        with pipeline.streams.of_task(-1 - number):
            moved = self._moved(batch)
            return pipeline.evaluate(
                lambda model: evaluate(model, moved), shapes_of(batch), partial(self._stage_context, pipeline.stages)
            )

    @contextmanager
    def _stage_context(self, stages: Stages, local_stage: int) -> Iterator[None]:
        """The task's code runs once for each stage of this rank, and counts once."""
        with ExitStack() as contexts:
            if not stages.ends(local_stage):
                contexts.enter_context(self._task_log.discarding())
            if local_stage + 1 < stages.num_own:
                contexts.enter_context(self._task_state.restored())
                contexts.enter_context(self._metrics.restored())
            yield

    def _moved(self, batch: Any) -> Any:
        return batch if self._world.device.type == "cpu" else self._transfer.finish(batch)

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

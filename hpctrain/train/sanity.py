"""A few evaluated batches before the first step, so that a mistake in the evaluation doesn't show hours later."""

from __future__ import annotations

from hpctrain.errors import ConfigError, TaskError
from hpctrain.phrases import listed
from hpctrain.tasks.task import Task
from hpctrain.train.evaluation import PREFIX
from hpctrain.train.parts import Parts


def check_evaluation(parts: Parts) -> None:
    """Evaluate `trainer.sanity_batches` micro-batches on each rank, and leave no trace; collective.

    Raises:
        TaskError: the evaluation broke its contract, or doesn't return the task's metric.
        ConfigError: it doesn't return `checkpoint.metric`.
    """
    num_batches, evaluation = parts.config.trainer.sanity_batches, parts.evaluation
    if evaluation is None or not num_batches:
        return
    try:
        names = [name.removeprefix(PREFIX) for name in evaluation.try_out(num_batches)]
    except Exception as error:
        # a task may need something that only training gives it, and then doesn't know why it is evaluated so early
        error.add_note(f"(this evaluation ran before the first step: trainer.sanity_batches={num_batches})")
        raise
    if names:
        _require_metrics(parts, names)


def _require_metrics(parts: Parts, names: list[str]) -> None:
    policy, task = parts.config.checkpoint, parts.task
    if policy.metric is not None and policy.metric not in names:
        raise ConfigError(
            "checkpoint.metric", policy.metric, f"the evaluation returns {listed(names)}", "name one of these"
        )
    # a task that returns no loss, and doesn't say what to rank by, ranks nothing unless the best are kept
    is_needed = task.metric != Task.metric or (policy.keep_best and policy.metric is None)
    if is_needed and task.metric not in names:
        kind = type(task).__name__
        raise TaskError(
            f"{kind}.metric is {task.metric!r}, but {kind}.evaluate and {kind}.derive return {listed(names)}: "
            "set metric to one of these"
        )

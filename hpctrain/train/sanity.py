"""Evaluate a few batches before the first step, so that a mistake in the evaluation shows at once, not hours later."""

from __future__ import annotations

import difflib
import logging
import re

from hpctrain.config.checkpoint import EVAL_PREFIX
from hpctrain.errors import ConfigError, TaskError
from hpctrain.phrases import listed
from hpctrain.rank.agreement import Agreement
from hpctrain.rank.stop_request import Stop
from hpctrain.tasks.task import Task
from hpctrain.train.training import Training

TYPO = 0.8
"""Similarity (`difflib`) from which a name is taken for a typo of another: `acuracy`, but not `recall_neg`."""

OF_OTHER_LIBRARIES = re.compile(r"^(val|valid|validation|test|eval)[_/]")
"""What Lightning's and Keras' users write before the name of an evaluation's metric."""

log = logging.getLogger("hpctrain.train")


def check_evaluation(training: Training, agreement: Agreement) -> Stop | None:
    """Evaluate `trainer.sanity_batches` micro-batches on each rank, and leave no trace; collective.

    A metric that these batches don't return is refused if they are all, or if its name looks like a typo. Otherwise a
    later batch may return it, and only a warning is logged.

    Args:
        training: what is trained.
        agreement: of the ranks, which decides whether they stop meanwhile.

    Returns:
        The stop upon which the ranks agreed, if any.

    Raises:
        TaskError: the evaluation broke its contract, or doesn't return the task's metric.
        ConfigError: it doesn't return `checkpoint.metric`, or the metric of early stopping.
    """
    num_batches, evaluation = training.config.trainer.sanity_batches, training.evaluation
    if evaluation is None or not num_batches:
        return None
    try:
        evaluated = evaluation.try_out(agreement, num_batches)
    except Exception as error:
        # a task may need something that only training gives it, and then doesn't know why it is evaluated so early
        error.add_note(f"(this evaluation ran before the first step: trainer.sanity_batches={num_batches})")
        raise
    if evaluated.stop is not None:
        return evaluated.stop
    if evaluated.means:
        training.task_log.require_no_medium(evaluated.means)
        names = [name.removeprefix(EVAL_PREFIX) for name in evaluated.means]
        _require_metrics(training, names, is_whole=evaluation.is_whole(num_batches))
    # `derive` may have taken long as well
    return agreement.start()


def _require_metrics(training: Training, names: list[str], *, is_whole: bool) -> None:
    policy, task = training.config.checkpoint, training.task
    kind, returned = type(task).__name__, listed(names)
    or_return_it = "" if is_whole else ", or return it from every batch, with a count of 0 where it has no value"

    def is_refused(metric: str, key: str) -> bool:
        if metric in names:
            return False
        if is_whole or _looks_like_a_typo(metric, names):
            return True
        if training.world.is_rank_zero:
            log.warning(
                "%s is %s, but the first batches of the evaluation return %s; nothing is wrong if later ones return it",
                key,
                metric,
                returned,
            )
        return False

    judged = training.callbacks.judged_metrics()
    for key, metric in {"checkpoint.metric": policy.metric, **judged}.items():
        if metric is not None and is_refused(metric, key):
            raise ConfigError(key, metric, f"the evaluation returns {returned}", f"name one of these{or_return_it}")
    for rate in (update.learning_rate for update in training.step.updates):
        if rate.followed is not None and is_refused(rate.followed, rate.key):
            problem = f"needs the metric {rate.followed}, but the evaluation returns {returned}"
            raise ConfigError(rate.key, "plateau", problem, f"set checkpoint.metric to one of these{or_return_it}")
    # a task that returns no loss, and doesn't say what to rank by, ranks nothing unless the best are kept
    is_judged = policy.metric is None and (policy.keep_best or None in judged.values())
    is_needed = task.metric != Task.metric or is_judged
    if is_needed and is_refused(task.metric, f"{kind}.metric"):
        raise TaskError(
            f"{kind}.metric is {task.metric!r}, but {kind}.evaluate and {kind}.derive return {returned}: "
            f"set metric to one of these{or_return_it}"
        )


def _looks_like_a_typo(metric: str, names: list[str]) -> bool:
    written = metric.lower()
    if OF_OTHER_LIBRARIES.sub("", written) in names or any(_abbreviates(written, name.lower()) for name in names):
        return True
    # recall_0 and recall_1 are of two classes, of which a batch may have only one
    others = [name.lower() for name in names if _with_zeros(name) != _with_zeros(metric)]
    return bool(difflib.get_close_matches(written, others, n=1, cutoff=TYPO))


def _abbreviates(written: str, name: str) -> bool:
    """Whether one is the other's beginning, as of acc and accuracy, but not of recall and recall_neg."""
    short, long = sorted((written, name), key=len)
    rest = long.removeprefix(short)
    return long != rest and rest.isalpha() and len(short) > 2 and len(rest) > 2


def _with_zeros(name: str) -> str:
    return re.sub(r"\d+", "0", name)

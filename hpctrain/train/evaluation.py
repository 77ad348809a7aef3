"""Evaluation over all ranks: every held-out sample counts once, and the results are reduced once."""

from __future__ import annotations

import difflib
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpctrain.attempt.lost_gpu import closing_unless_lost
from hpctrain.checkpoint.rng import restore_rng, rng_state
from hpctrain.config.checkpoint import EVAL_PREFIX
from hpctrain.config.precision import NumberFormats
from hpctrain.data.loader import EvalLoader
from hpctrain.data.micro_batch import MoveOnDemand, count_samples, map_tensors
from hpctrain.errors import ConfigError, HpctrainError, TaskError
from hpctrain.metrics.progress import Bar
from hpctrain.parallel.local_part import whole
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.parallel.replica import Replica
from hpctrain.parallel.trial_pass import buffers_and_rng_restored
from hpctrain.phrases import counted, listed
from hpctrain.rank.agreement import Agreement, LoadingStop, StopWhileLoading
from hpctrain.rank.compiler import uncompiled
from hpctrain.rank.determinism import random_states_restored
from hpctrain.rank.stop_request import Stop
from hpctrain.tasks.task import Task
from hpctrain.train.ema import Ema
from hpctrain.train.evaluation_results import EvaluationResults, OnRankZeroError
from hpctrain.train.loss_weights import LossWeights
from hpctrain.train.modes import evaluation_mode
from hpctrain.train.precision import autocast
from hpctrain.train.rank_comparison import RankComparison
from hpctrain.train.task_log import AttachedLog
from hpctrain.train.task_metrics import TaskMetrics
from hpctrain.train.task_state import TaskState, remember_attributes

if TYPE_CHECKING:
    from hpctrain.train.training import Training

_NO_MORE_ROUNDS = object()
VALUE_ERRORS = (ArithmeticError, ValueError)
"""Errors that the values of an untrained model can cause."""
TYPO = 0.8
"""Similarity (`difflib`) from which a name is taken for a typo of another: `acuracy`, but not `recall_neg`."""
EVALUATION_PREFIX = re.compile(r"^(val|valid|validation|test|eval)[_/]")
"""What Lightning's and Keras' users write before the name of an evaluation's metric."""

log = logging.getLogger("hpctrain.train")


@dataclass(frozen=True, slots=True)
class EvaluationSummary:
    """The result of one evaluation.

    Attributes:
        means: over all held-out samples, by name: `eval/loss` and so on; empty if the evaluation was abandoned.
        stop: the stop for which it was abandoned; None if it was completed.
    """

    means: Mapping[str, float] = field(default_factory=dict)
    stop: Stop | None = None


@dataclass(frozen=True)
class EvaluationPass:
    """Has the task evaluate a batch, through a model of this rank or one that the ranks share.

    An evaluation needs no more of a training. So it can be built before the training is complete, and tested without.

    Attributes:
        task: gives sums and counts.
        task_state: of the task.
        task_log: of the task.
        metrics: of the task.
        replica: of the model. DDP isn't used, since ranks may have different numbers of batches.
        world: the ranks.
    """

    task: Task
    task_state: TaskState
    task_log: AttachedLog
    metrics: TaskMetrics
    replica: Replica
    world: TrainingWorld

    @cached_property
    def _transfer(self) -> MoveOnDemand:
        return MoveOnDemand(self.task.to_device, self.world.device)

    def __call__(self, batch: Any, number: int) -> Any:
        """Return what the task's `evaluate` returns for a batch, unchecked; None if only other ranks get the results.

        Args:
            batch: on the CPU.
            number: of the batch in this evaluation.
        """
        return self.replica.evaluate(partial(self._prepare, batch), batch, number, self._counts_once)

    def _prepare(self, batch: Any) -> Callable[[nn.Module], Any]:
        moved = batch if self.world.device.type == "cpu" else self._transfer.finish(batch)
        return partial(self._evaluate, batch=moved)

    def _evaluate(self, model: nn.Module, batch: Any) -> Any:
        returned = self.task.evaluate(model, batch)
        # at once: weights may be gathered for this call only, and averaged weights are swapped out again
        self.metrics.copy_shared(model)
        # with a model that divides its outputs among ranks, results are DTensors
        return map_tensors(whole, returned) if self.replica.divides_results else returned

    @contextmanager
    def _counts_once(self, has_results: bool, is_repeated: bool) -> Iterator[None]:
        """Have the task's code count once, although it runs for each part of a model that this rank has."""
        with ExitStack() as contexts:
            if not has_results:
                contexts.enter_context(self.task_log.discarding())
            if is_repeated:
                contexts.enter_context(self.task_state.restored())
                contexts.enter_context(self.metrics.restored())
            yield

    def join(self, loader: EvalLoader) -> None:
        """Take part in the passes of the other ranks in a round without a batch for this rank; leaves no trace.

        Args:
            loader: of the evaluation.
        """
        if not self.replica.is_shared or (stand_in := loader.stand_in()) is None:
            return
        with random_states_restored(self.world.gpus), self._counts_once(has_results=False, is_repeated=True):
            self(stand_in, 0)


@contextmanager
def evaluating(model: nn.Module, ema: Ema | None, precision: NumberFormats, device: torch.device) -> Iterator[None]:
    """Compute in the context as an evaluation does, without gradients.

    Args:
        model: is in evaluation mode.
        ema: averaged weights, which the model has meanwhile; None for its own.
        precision: the number formats, which decide the autocast.
        device: of the model.
    """
    weights = nullcontext() if ema is None else ema.in_place()
    # Not in inference mode: a module may keep a tensor that it makes in its first pass, such as a table of positions,
    # and a tensor that was made in inference mode can't take part in a backward pass.
    with evaluation_mode(model), weights, torch.no_grad(), autocast(precision, device):
        yield


@dataclass(eq=False)
class Evaluation:
    """Evaluates the model that is in training.

    Attributes:
        evaluation_pass: has the task evaluate a batch.
        loader: of the held-out samples of this rank.
        precision: the number formats, which decide the autocast.
        max_gathered_mb: bound on the per-sample values that rank zero gets.
        ema: averaged weights to evaluate; None for the live ones.
        loss_weights: weigh the values that the task logs; None for the number of samples in the loader's batches.
        bar: shows the progress after each batch of this rank; None for no bar.
        num_batches: batches over all evaluations so far; shows that an evaluation makes progress.
    """

    evaluation_pass: EvaluationPass
    loader: EvalLoader
    _: KW_ONLY
    precision: NumberFormats
    max_gathered_mb: int = 1024
    ema: Ema | None = None
    loss_weights: LossWeights | None = None
    bar: Bar | None = None
    num_batches: int = field(default=0, init=False)
    _loading: LoadingStop | None = field(default=None, init=False)
    _pass_number: int = field(default=0, init=False)
    _round: int = field(default=0, init=False)
    # only in the first evaluation: later, a difference would end a run of days
    _compares_names: bool = field(default=True, init=False)

    def add_to(self, comparison: RankComparison) -> None:
        """Add the task's metric objects to what the ranks compare."""
        self.evaluation_pass.metrics.add_to(comparison)

    def __call__(self, agreement: Agreement) -> EvaluationSummary:
        """Evaluate, unless a rank receives a request to stop meanwhile; collective.

        An evaluation that is abandoned leaves the random state and the task's own state as they were before.

        Args:
            agreement: of the ranks, which decides whether they stop.

        Raises:
            TaskError: the task broke its contract, or the ranks have different held-out samples.
            ConfigError: the values per sample are more than `max_gathered_mb`.
        """
        self.evaluation_pass.replica.send_buffers()
        before = rng_state(self.evaluation_pass.world.gpus)
        task_state = self.evaluation_pass.task_state.snapshot()
        results = self._new_results()
        with self.evaluation_pass.task_log.evaluation_mode(), self._evaluating():
            stop = self._run_stoppable(partial(self._evaluate, results), agreement.restarted())
        if stop is not None:
            self.evaluation_pass.metrics.reset()
            restore_rng(before, self.evaluation_pass.world.gpus)
            self.evaluation_pass.task_state.restore_snapshot(task_state)
            self.evaluation_pass.task_log.media.drop()
            return EvaluationSummary(stop=stop)
        results.require_room()
        means = self._reduce(results)
        with self.evaluation_pass.task_log.deriving():
            evaluated = EvaluationSummary(means | results.compute_others(means))
        self.evaluation_pass.metrics.reset()
        return evaluated

    def try_out(self, agreement: Agreement, num_batches: int) -> EvaluationSummary:
        """Evaluate a few micro-batches on each rank, and leave no trace; collective.

        Weights, buffers, modes, random states and the task's own state are as before. Other attributes of the task are
        as `evaluate` and `derive` leave them, unless `derive` fails (`remember_attributes`).

        Args:
            agreement: of the ranks, which decides after each micro-batch whether they stop.
            num_batches: at most so many on each rank.

        Returns:
            The metrics over these batches; none if the task can't compute some of them from so few.

        Raises:
            TaskError: the task broke its contract, or the ranks have different held-out samples.
            ConfigError: the values of all held-out samples would be more than `max_gathered_mb`.
        """
        self._require_same_samples(self.loader.num_samples)
        results, undo = self._new_results(), remember_attributes(self.evaluation_pass.task)
        with (
            self.evaluation_pass.task_log.trying_out(),
            self.evaluation_pass.task_state.restored(),
            buffers_and_rng_restored(self.evaluation_pass.replica.model, self.evaluation_pass.world),
        ):
            with uncompiled(), self._evaluating():
                stop = self._run_stoppable(partial(self._try_out, results, num_batches), agreement)
            if stop is not None:
                return EvaluationSummary(stop=stop)
            self._require_same_samples(self.loader.end)
            results.require_room(self.loader.num_samples)
            means = self._reduce(results)
            try:
                with self.evaluation_pass.task_log.deriving():
                    computed = results.compute_others(means)
            except Exception as error:
                if not self._is_excused(error, results.doing, num_batches):
                    raise
                undo()
                return EvaluationSummary()
            finally:
                self.evaluation_pass.metrics.reset()
            return EvaluationSummary(means | computed)

    def _reduce(self, results: EvaluationResults) -> dict[str, float]:
        compare, self._compares_names = self._compares_names, False
        return results.reduce(interleaved=self.loader.is_interleaved, compare_names=compare)

    def is_whole(self, num_batches: int) -> bool:
        """Whether so many micro-batches on each rank are known to be all held-out samples."""
        num_rounds = self.loader.num_rounds
        return num_rounds is not None and num_rounds <= num_batches

    def _is_excused(self, error: Exception, doing: str, num_batches: int) -> bool:
        """Whether an error of the task's code may be due to the few batches, or the untrained model."""
        if isinstance(error, HpctrainError) and not isinstance(error, OnRankZeroError):
            return False
        # the loss of an untrained model can be too large for an exponential
        is_value_error = error.is_value_error if isinstance(error, OnRankZeroError) else isinstance(error, VALUE_ERRORS)
        is_excused = is_value_error or not self.is_whole(num_batches)
        if is_excused and self.evaluation_pass.world.is_rank_zero:
            log.warning(
                "%s failed in the evaluation before the first step (trainer.sanity_batches=%d); ignore this if it "
                "needs all held-out samples, or a trained model",
                doing,
                num_batches,
                exc_info=error,
            )
        return is_excused

    def _new_results(self) -> EvaluationResults:
        parts, max_mb = self.evaluation_pass, self.max_gathered_mb
        parts.metrics.reset()
        return EvaluationResults(parts.task, parts.metrics, parts.task_log, parts.world, max_gathered_mb=max_mb)

    def _evaluating(self) -> AbstractContextManager[None]:
        replica, world = self.evaluation_pass.replica, self.evaluation_pass.world
        return evaluating(replica.model, self.ema, self.precision, world.device)

    def _run_stoppable(self, evaluate: Callable[[Agreement], Stop | None], agreement: Agreement) -> Stop | None:
        """Evaluate; return the stop on which the ranks agreed, also while all of them wait for a batch; collective."""
        self._pass_number += 1
        self._loading = agreement.loading_stop(lambda: f"evaluation/{self._pass_number}/{self._round}")
        try:
            return evaluate(agreement)
        except StopWhileLoading:
            return agreement.agree_on_stop()

    def _try_out(self, results: EvaluationResults, num_batches: int, agreement: Agreement) -> Stop | None:
        num_rounds = self.loader.num_rounds
        with closing_unless_lost(self.loader.rounds(num_batches, self._loading)) as rounds:
            # the same number of agreements on every rank, even if a rank finds the end of a stream early
            for round_index in range(num_batches if num_rounds is None else min(num_batches, num_rounds)):
                self._take_round(results, rounds, round_index)
                # at once, and not a round later: a single batch can take minutes
                if (stop := agreement.agree_and_calibrate()) is not None:
                    return stop
        return None

    def _evaluate(self, results: EvaluationResults, agreement: Agreement) -> Stop | None:
        num_rounds = self.loader.num_rounds
        with closing_unless_lost(self.loader.rounds(loading=self._loading)) as rounds:
            # a rank without a batch in a round still has to join the collective agreement
            for round_index in itertools.count() if num_rounds is None else range(num_rounds):
                is_over = not self._take_round(results, rounds, round_index) and num_rounds is None
                # An evaluation saves nothing, so `save` says that a rank has reached the end of a stream without a
                # length, or keeps too much. All ranks then leave the loop together: a rank that left alone would leave
                # the others waiting.
                decision = agreement.decide(round_index, save=is_over or results.is_full)
                if decision.save:
                    # refuses what is too much
                    results.require_room()
                    break
                if decision.stop is not None:
                    return decision.stop
        if num_rounds is None:
            self._require_same_samples(self.loader.end, unknown_allowed=False)
        return None

    def _take_round(self, results: EvaluationResults, rounds: Iterator[Any], round_index: int) -> bool:
        """Evaluate this rank's batch of the next round, if it has one; return False after the last round."""
        self._round = round_index
        with self.evaluation_pass.replica.loading(round_index):
            batch = next(rounds, _NO_MORE_ROUNDS)
        if self._loading is not None and self._loading.is_counted:
            self._loading.arrived()
        if batch is None or batch is _NO_MORE_ROUNDS:
            self.evaluation_pass.join(self.loader)
        else:
            num_taken, weights = self.loader.num_taken, self.loss_weights
            weight: float = num_taken
            if weights is not None and weights.vary:
                # before the pass, since a task may move the batch in place
                weight, _ = weights.weigh(batch, num_taken, count_samples(batch, num_taken, num_taken))
            returned = self.evaluation_pass(batch, round_index)
            if self.evaluation_pass.replica.has_results:
                results.add(round_index, num_taken, returned, weight=weight)
        if batch is _NO_MORE_ROUNDS:
            return False
        self.num_batches += 1
        if self.bar is not None:
            self.bar.show("evaluation", round_index + 1, self.loader.num_rounds)
        return True

    def _require_same_samples(self, num_samples: int | None, *, unknown_allowed: bool = True) -> None:
        """Check that all ranks have the same number of held-out samples; collective.

        Args:
            num_samples: the number; None if this rank doesn't know it.
            unknown_allowed: whether to ignore ranks that don't know it; otherwise they have more than the others.
        """
        decide = partial(_difference, unknown_allowed=unknown_allowed)
        if difference := self.evaluation_pass.world.decide_on_rank_zero(num_samples, decide):
            kind = type(self.evaluation_pass.task).__name__
            raise TaskError(
                f"{kind}.eval_dataset: expected the same samples on every rank, found "
                f"{difference}; return the same dataset on every rank, and don't split a stream by rank or by worker"
            )


def _difference(num_samples: Sequence[int | None], *, unknown_allowed: bool) -> str:
    """Describe two ranks with different numbers of samples; empty if there are none.

    Args:
        num_samples: of each rank; None is more than any number.
        unknown_allowed: whether to ignore ranks with None.
    """
    by_rank = [(rank, number) for rank, number in enumerate(num_samples) if number is not None or not unknown_allowed]
    by_number = sorted(by_rank, key=lambda item: (item[1] is None, item[1]))
    if not by_number or by_number[0][1] == by_number[-1][1]:
        return ""
    (rank, smallest), (other_rank, largest) = by_number[0], by_number[-1]
    assert smallest is not None
    larger = "more" if largest is None else str(largest)
    return f"{counted(smallest, 'sample')} on rank {rank} and {larger} on rank {other_rank}"


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
    return agreement.agree_and_calibrate()


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
        if rate.metric is not None and is_refused(rate.metric, rate.key):
            problem = f"needs the metric {rate.metric}, but the evaluation returns {returned}"
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
    lowercase = metric.lower()
    if EVALUATION_PREFIX.sub("", lowercase) in names or any(_abbreviates(lowercase, name.lower()) for name in names):
        return True
    # recall_0 and recall_1 are of two classes, of which a batch may have only one
    candidates = [name.lower() for name in names if _with_zeros(name) != _with_zeros(metric)]
    return bool(difflib.get_close_matches(lowercase, candidates, n=1, cutoff=TYPO))


def _abbreviates(metric: str, name: str) -> bool:
    """Whether one is the other's beginning, as of acc and accuracy, but not of recall and recall_neg."""
    short, long = sorted((metric, name), key=len)
    suffix = long.removeprefix(short)
    return long != suffix and suffix.isalpha() and len(short) > 2 and len(suffix) > 2


def _with_zeros(name: str) -> str:
    return re.sub(r"\d+", "0", name)

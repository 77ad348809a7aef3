"""One rank's training: what it trains with, and how that is built from the configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from hpctrain.checkpoint.best import judging_metric, resolve_keep_best
from hpctrain.config.checkpoint import Checkpoint
from hpctrain.config.root import Config
from hpctrain.data.loader import EvalLoader
from hpctrain.metrics.meter import Meter
from hpctrain.metrics.progress import Bar
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.parallel.replica import inner
from hpctrain.rank.determinism import random_states_restored, seed_everything
from hpctrain.rank.stop_request import StopRequest
from hpctrain.tasks.position import Position
from hpctrain.tasks.task import Task
from hpctrain.train.build import Network, build_network, build_trained_task
from hpctrain.train.build_learning_rate import Span
from hpctrain.train.build_step import StepBuilder, loss_names
from hpctrain.train.callbacks import Callbacks, build_callbacks
from hpctrain.train.ema import Ema
from hpctrain.train.evaluation import Evaluation, EvaluationPass
from hpctrain.train.model_memory import ModelMemory, model_memory
from hpctrain.train.optimizers import BuiltOptimizer, build_optimizers
from hpctrain.train.rank_comparison import RankComparison
from hpctrain.train.step import TrainStep
from hpctrain.train.stopping import EarlyEnd
from hpctrain.train.task_log import AttachedLog, attach, build_meter
from hpctrain.train.task_metrics import build_metrics
from hpctrain.train.task_state import TaskState
from hpctrain.train.training_data import TrainingData, build_training_data
from hpctrain.train.update import JointUpdate

log = logging.getLogger("hpctrain.train")


def build(
    config: Config,
    world: TrainingWorld,
    *,
    resumes: bool = False,
    stop: StopRequest | None = None,
    bar: Bar | None = None,
    only_trains: bool = False,
    after_backward: Callable[[JointUpdate], None] | None = None,
) -> Training:
    """Build what this rank trains with, and compare it with what the other ranks have built; collective.

    The order of the statements is that of their effects, and decides the bits: a draw in the wrong place shifts all
    later ones. So constructors draw, log and exchange nothing; functions named `build_` do. Nor does a property build
    at its first use, whose place would then decide the order.

    Args:
        config: of the run.
        world: the ranks.
        resumes: whether the run has a checkpoint; the same on every rank. A new run starts from the weights of
            `config.init_from`, if that is set; in one that resumes, a mesh leaves out initial values that the
            checkpoint contains.
        stop: ends the wait for the samples that the ranks compare, once a stop is requested; None for no stop.
        bar: shows how far an evaluation is; None for no bar.
        only_trains: leave out the callbacks and the evaluation, as for steps that are only measured.
        after_backward: called before the updates of each turn; None for the callbacks' own hooks, if there are any.

    Raises:
        TaskError: the task broke its contract, or the ranks have built different things.
        ConfigError: a key doesn't fit the task, its data or its model.
    """
    # the same seed on every rank: what the task draws while it builds its data and model has to be the same, too
    seed_everything(config.seed)
    task = _prepared_task(config, world)
    task_state = TaskState(task, world)
    data = build_training_data(config, task, world)
    position = Position(data.plan.steps_per_epoch, data.total_steps)
    task_log = AttachedLog(
        type(task).__name__,
        position,
        total_steps=data.total_steps,
        every_steps=config.logger.every_steps,
        is_rank_zero=world.is_rank_zero,
    )
    attach(task, task_log, position)
    network = build_network(config, task, world, resumes=resumes)
    task_state.leave_out(inner(network.module))
    _warn_of_single_samples(network.model, data)
    optimizers = build_optimizers(config.optimizer, network.module, config.trainer.global_batch_size)
    meter = build_meter(world, *loss_names(optimizers))
    callbacks = build_callbacks({} if only_trains else config.callbacks)
    step = StepBuilder(config, world, task, task_state, task_log, meter, network, _span(data)).build(
        optimizers, partial(data.first_micro_batch, task_state), after_backward or callbacks.before_updates(meter)
    )
    task_log.reserve(step.logged_names)
    data.require_same_samples(task_state, stop)
    # before a resume restores the random state: the task may draw numbers for these samples, which must not advance it
    eval_data = None if only_trains else task.eval_dataset()
    evaluation = None
    if eval_data is not None:
        evaluation_pass = EvaluationPass(task, task_state, task_log, build_metrics(task, world), network.replica, world)
        evaluation = _build_evaluation(evaluation_pass, eval_data, data, step.ema, bar)
    _require_same_evaluation(eval_data, evaluation, data, task_state, stop)
    return Training(
        config=config,
        world=world,
        resumes=resumes,
        task=task,
        task_state=task_state,
        task_log=task_log,
        position=position,
        data=data,
        network=network,
        optimizers=optimizers,
        meter=meter,
        step=step,
        ema=step.ema,
        ending=EarlyEnd(config, world),
        callbacks=callbacks,
        eval_data=eval_data,
        evaluation=evaluation,
    )


@dataclass(frozen=True, kw_only=True)
class Training:
    """Task, data, model, optimizers and step of one rank, with its callbacks and evaluation; complete once it is built.

    Attributes:
        config: of the run.
        world: the ranks.
        resumes: whether the run had a checkpoint when this was built; `Checkpointing.resume` then requires one.
        task: what is trained.
        task_state: what the task keeps outside of the model.
        task_log: collects what the task logs; it discards everything until the training begins.
        position: the step and epoch of the training, which the task can read.
        data: the training samples, planned, ordered and weighted.
        network: the model, as what computes, what is trained and what the ranks share.
        optimizers: over the parameters of `module`, with their groups.
        meter: collects the training loss, and the scalars that the task logs with it.
        step: one step, with a turn for each loss.
        ema: the moving average of the weights, or None.
        ending: ends the run before its last step, if a callback or a time limit requests it.
        callbacks: of the configuration.
        eval_data: the held-out samples; None without any.
        evaluation: over the held-out samples; None without any.
    """

    config: Config
    world: TrainingWorld
    resumes: bool
    task: Task
    task_state: TaskState
    task_log: AttachedLog
    position: Position
    data: TrainingData
    network: Network
    optimizers: list[BuiltOptimizer]
    meter: Meter
    step: TrainStep
    ema: Ema | None
    ending: EarlyEnd
    callbacks: Callbacks
    eval_data: Dataset[Any] | None
    evaluation: Evaluation | None

    @property
    def model(self) -> nn.Module:
        """The module that forward passes call, without DDP's wrapper."""
        return self.network.model

    @property
    def module(self) -> nn.Module:
        """The module whose weights are trained and saved; `model` itself, except in fp16_master."""
        return self.network.module

    @property
    def total_steps(self) -> int:
        """The last step of the run."""
        return self.data.total_steps

    @cached_property
    def checkpoint_policy(self) -> Checkpoint:
        """conf/checkpoint, with `keep_best=null` replaced by the number for this run."""
        metric, mode = self.task.metric, self.task.metric_mode
        return resolve_keep_best(self.config.checkpoint, metric, mode, evaluates=self.eval_data is not None)

    def model_memory(self) -> ModelMemory:
        """Return the bytes that weights, gradients and optimizer states take on this rank."""
        gradient_bytes = partial(self.network.replica.gradient_bytes, accumulates=self.data.plan.accumulation > 1)
        return model_memory({self.model, self.module}, self.optimizers, self.ema, gradient_bytes)


def _prepared_task(config: Config, world: TrainingWorld) -> Task:
    """Build the task, and prepare its data once per node; collective."""
    task = build_trained_task(config)
    if world.local_rank == 0:
        # prepare may draw random numbers, but not on every rank, and not on a resume
        with random_states_restored(world.gpus):
            task.prepare()
    world.barrier()
    return task


def _span(data: TrainingData) -> Span:
    task = data.task
    steps_per_epoch = None if data.num_samples is None else data.plan.steps_per_epoch
    metric, mode = judging_metric(data.config.checkpoint, task.metric, task.metric_mode)
    return Span(data.total_steps, steps_per_epoch, metric, mode)


def _warn_of_single_samples(model: nn.Module, data: TrainingData) -> None:
    """Log a warning if a batch norm, whose variance needs two samples, will get a single one."""
    plan, world = data.plan, data.world
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    # a synchronised one computes the variance over the samples of all ranks
    local = [norm for norm in norms if norm.training and (world.size == 1 or not isinstance(norm, nn.SyncBatchNorm))]
    ends_an_epoch = data.num_samples is not None and data.total_steps >= plan.steps_per_epoch
    if local and ends_an_epoch and plan.ends_with_single_samples and world.is_rank_zero:
        log.warning(
            "the last step of each epoch (step %d) gives %s a single sample, of which %s can't compute a variance: "
            "set data.drop_last=true, which leaves that step out",
            plan.steps_per_epoch,
            "a rank" if world.size > 1 else "the model",
            type(local[0]).__name__,
        )


def _build_evaluation(
    evaluation_pass: EvaluationPass, dataset: Dataset[Any], data: TrainingData, ema: Ema | None, bar: Bar | None
) -> Evaluation:
    config, world = data.config, data.world
    loader = EvalLoader(
        dataset,
        data.plan.micro_batch_size,
        rank=world.share.number,
        world_size=world.share.count,
        collate_fn=data.task.collate_fn,
        workers=data.workers_for(dataset),
    )
    return Evaluation(
        evaluation_pass,
        loader,
        precision=config.precision.formats,
        max_gathered_mb=config.trainer.max_gathered_mb,
        ema=ema if config.trainer.eval_ema else None,
        loss_weights=data.loss_weights,
        bar=bar,
    )


def _require_same_evaluation(
    dataset: Dataset[Any] | None,
    evaluation: Evaluation | None,
    data: TrainingData,
    task_state: TaskState,
    stop: StopRequest | None,
) -> None:
    """Refuse ranks that evaluate differently; collective."""
    comparison = RankComparison(data.world)
    comparison.add_dataset("held-out", dataset)
    if evaluation is not None:
        evaluation.add_to(comparison)
    comparison.require_same()
    if dataset is not None:
        data.compare_samples("held-out", dataset, task_state, stop, seed=0)

"""Everything that one rank trains with, built from the configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import cached_property
from typing import Any

import numpy as np
from torch import nn
from torch.utils.data import Dataset

from hpctrain.attempt.lost_gpu import closing_unless_lost
from hpctrain.checkpoint.best import judged_by, resolved_policy
from hpctrain.config.batch import micro_batch_size_of
from hpctrain.config.checkpoint import Checkpoint
from hpctrain.config.mesh import keeps_gradients_whole
from hpctrain.config.named_optimizers import losses_of, named_optimizers
from hpctrain.config.root import Config
from hpctrain.data.bookmark import Bookmarks
from hpctrain.data.fetch import dataset_length
from hpctrain.data.loader import TrainLoader
from hpctrain.data.micro_batch import MicroBatch
from hpctrain.data.order import Order, ShuffledOrder, sequential
from hpctrain.data.plan import BatchPlan
from hpctrain.data.stream import is_stream
from hpctrain.data.transfer import BatchTransfer, CopyInBackground, MoveOnDemand
from hpctrain.data.workers import Workers, default_num_workers
from hpctrain.distributed.determinism import random_states_restored, seed_everything
from hpctrain.distributed.replica import inner
from hpctrain.distributed.stop_request import StopRequest
from hpctrain.distributed.world import World
from hpctrain.errors import TaskError
from hpctrain.metrics.meter import Meter
from hpctrain.phrases import listed
from hpctrain.tasks.position import Position
from hpctrain.tasks.task import Task
from hpctrain.train.build import Network, build_network, build_trained_task
from hpctrain.train.build_learning_rate import Span
from hpctrain.train.build_step import StepBuilder, loss_names
from hpctrain.train.callbacks import Callbacks
from hpctrain.train.ending import Ending
from hpctrain.train.evaluation import Evaluation
from hpctrain.train.loss_weights import LossWeights
from hpctrain.train.meters import meter_of
from hpctrain.train.model_memory import ModelMemory, model_memory
from hpctrain.train.optimizers import build_optimizers
from hpctrain.train.rank_comparison import SAME_CONFIGURATION, SAME_ORDER, RankComparison
from hpctrain.train.sample_check import SampleCheck
from hpctrain.train.stream_state import StreamState
from hpctrain.train.task_log import AttachedLog, attach
from hpctrain.train.task_state import TaskState
from hpctrain.train.update import JointUpdate

NUM_ORDERED = 16
"""Number of samples, in the order of the first epoch, that ranks compare at the start."""

log = logging.getLogger("hpctrain.train")


class Parts:
    """Task, data, model, optimizer and the step over them; building is collective.

    Args:
        config: of the run.
        world: the ranks.
        fresh: whether the run is new, and starts from the weights of `config.init_from` if that is set.
        resumes: whether a checkpoint is there. Then a mesh leaves out initial values that it contains; the same on
            every rank.
        stop: a request to stop ends the wait for the samples that the ranks compare; None for no stop.
        callbacks: makes what watches the training, once everything is built but the step; None for no callbacks.
        after_backward: called before the updates of each turn; None for the callbacks' own hooks, if there are any.

    Attributes:
        resumes: as given.
        task: what is trained.
        task_state: what the task keeps outside of the model.
        position: of the training, which the task sees.
        task_log: what the task logs; it discards until the training begins.
        num_samples: of the training data; None for a stream without a length.
        stream_state: how far streams were read.
        loss_weights: of the training's micro-batches.
        plan: the batch arithmetic.
        model: which forward passes go through, without DDP's wrapper.
        module: holds the weights that are trained and saved; `model` itself, except in fp16_master.
        sharded: what is called where the ranks of a mesh share the model; None otherwise.
        pipeline: this rank's part in a pipeline; None without one.
        optimizers: over the parameters of `module`, with their groups.
        ema: the moving average of the weights, or None.
        meter: collects the training loss, and what else the task logs in it.
        step: one step, with a turn for each loss.
        workers: of each rank, for the training samples.
        ending: of the run, if that comes before its last step.
        callbacks: what watches the training.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        *,
        fresh: bool = False,
        resumes: bool = False,
        stop: StopRequest | None = None,
        callbacks: Callable[[Parts], Callbacks] | None = None,
        after_backward: Callable[[JointUpdate], None] | None = None,
    ) -> None:
        self.config = config
        self.world = world
        self.resumes = resumes
        self._stop = stop
        # the same seed on every rank: what the task draws while it builds its data and model has to be the same, too
        seed_everything(config.seed)
        self.task = self._prepared_task()
        self.task_state = TaskState(self.task, world)
        self.train_data = self.task.train_dataset()
        self._require_same_training()
        self.num_samples = dataset_length(self.train_data)
        self.stream_state = StreamState(self.train_data, world)
        self.loss_weights = LossWeights(self.task, self.train_data, world)
        self.plan = self._batch_plan()
        self.position = Position(self.plan.steps_per_epoch, self.total_steps)
        self.task_log = AttachedLog(
            type(self.task).__name__,
            self.position,
            total_steps=self.total_steps,
            every_steps=config.logger.every_steps,
            is_rank_zero=world.is_rank_zero,
        )
        attach(self.task, self.task_log, self.position)
        network = self._network(fresh=fresh, resumes=resumes)
        self.model = network.model
        self.module = network.module
        self.sharded = network.sharded
        self.pipeline = network.pipeline
        self.task_state.leave_out(inner(self.module))
        self._warn_of_single_samples()
        self.optimizers = build_optimizers(config.optimizer, self.module, config.trainer.global_batch_size)
        self.meter = self.new_meter(*loss_names(self.optimizers))
        self.ending = Ending(config, world)
        self.callbacks = Callbacks() if callbacks is None else callbacks(self)
        builder = StepBuilder(
            config, world, self.task, self.task_state, self.task_log, self.meter, network, self._span()
        )
        hook = after_backward or self.callbacks.before_updates(self.meter)
        self.step = builder.build(self.optimizers, self.first_micro_batch, hook)
        self.task_log.reserve(self.step.logged_names)
        self.ema = self.step.ema
        self.workers = self._workers(self.train_data)
        self._require_same_samples()

    def new_meter(self, *names: str) -> Meter:
        """Make a meter over all ranks, with these names in every result."""
        return meter_of(self.world, *names)

    def model_memory(self) -> ModelMemory:
        """What this rank holds of the model, and of what is trained of it."""
        parallel = self.config.parallel
        # offloaded gradients are shards: the whole ones are on the GPU
        whole = self.plan.accumulation > 1 and not parallel.cpu_offload
        whole = whole and self.world.mesh is not None and keeps_gradients_whole(parallel, self.world.mesh.shape)
        return model_memory({self.model, self.module}, self.optimizers, self.ema, whole_gradients=whole)

    @property
    def total_steps(self) -> int:
        """The last step of the run: max_steps or max_epochs, whichever comes first."""
        trainer, epoch = self.config.trainer, self.plan.steps_per_epoch
        bounds = [trainer.max_steps, None if trainer.max_epochs is None else trainer.max_epochs * epoch]
        return min(bound for bound in bounds if bound is not None)

    def samples_seen(self, step: int) -> int:
        """Return the number of samples trained on in the first `step` steps, which are those completed so far."""
        return self.loss_weights.samples_seen if self.loss_weights.vary else self.plan.samples_seen(step)

    @contextmanager
    def first_micro_batch(self) -> Iterator[MicroBatch]:
        """Make a context with this rank's first micro-batch, after which the task is as before."""
        with (
            self.task_state.restored(),
            closing_unless_lost(self.loader(0).micro_batches(self.transfer)) as micro_batches,
        ):
            yield next(micro_batches)

    def _network(self, *, fresh: bool, resumes: bool) -> Network:
        if (mesh := self.world.mesh) is None:
            return build_network(self.config, self.task, self.world, fresh=fresh)
        # it imports torch's DTensor, which takes half a second
        from hpctrain.train.build_sharded import build_sharded_network

        # an optimizer of a user's own may keep the initial values
        targets = [each.node["_target_"] for each in named_optimizers(self.config.optimizer)]
        leave_saved = resumes and all(target.startswith("torch.optim.") for target in targets)
        return build_sharded_network(self.config, self.task, self.world, mesh, fresh=fresh, leave_saved=leave_saved)

    def _span(self) -> Span:
        metric, mode = judged_by(self.config.checkpoint, self.task.metric, self.task.metric_mode)
        steps_per_epoch = None if self.num_samples is None else self.plan.steps_per_epoch
        return Span(self.total_steps, steps_per_epoch, metric, mode)

    @cached_property
    def eval_data(self) -> Dataset[Any] | None:
        """The held-out samples; None without any."""
        return self.task.eval_dataset()

    @cached_property
    def checkpoint_policy(self) -> Checkpoint:
        """conf/checkpoint, with `keep_best=null` replaced by the number for this run."""
        metric, mode = self.task.metric, self.task.metric_mode
        return resolved_policy(self.config.checkpoint, metric, mode, evaluates=self.eval_data is not None)

    @cached_property
    def evaluation(self) -> Evaluation | None:
        """The evaluation; None if the task holds no samples out."""
        dataset = self.eval_data
        if dataset is None:
            return None
        return Evaluation(
            self.task,
            dataset,
            self.model,
            self.world,
            task_state=self.task_state,
            task_log=self.task_log,
            precision=self.config.precision.formats,
            workers=self._workers(dataset),
            micro_batch_size=self.plan.micro_batch_size,
            ema=self.ema if self.config.trainer.eval_ema else None,
            max_gathered_mb=self.config.trainer.max_gathered_mb,
            sharded=self.sharded,
            pipeline=self.pipeline,
            loss_weights=self.loss_weights,
        )

    def require_same_evaluation(self) -> None:
        """Refuse ranks that evaluate differently; collective."""
        comparison = RankComparison(self.world)
        comparison.add_dataset("held-out", self.eval_data)
        if self.evaluation is not None:
            self.evaluation.add_to(comparison)
        comparison.require_same()
        if self.eval_data is not None:
            self._check_samples("held-out", self.eval_data, 0)

    def loader(self, start_step: int, bookmarks: Bookmarks | None = None) -> TrainLoader:
        """Return this rank's training batches from a step on.

        Args:
            start_step: counted from 0.
            bookmarks: of `stream_state`, if the batches are trained on.
        """
        return TrainLoader(
            self.train_data,
            self._order(),
            self.plan,
            rank=self.world.data_rank,
            seed=self.config.seed,
            start_step=start_step,
            collate_fn=self.task.collate_fn,
            workers=self.workers,
            bookmarks=bookmarks,
            weigh=self.loss_weights.weigh if self.loss_weights.vary else None,
            requires_all=self.loss_weights.by_contents,
        )

    @cached_property
    def transfer(self) -> BatchTransfer | None:
        """What brings the training batches to the rank's GPU; None on a CPU."""
        device = self.world.device
        if device.type != "cuda":
            return None
        is_own = getattr(self.task.to_device, "__func__", None) is not Task.to_device
        return (MoveOnDemand if is_own else CopyInBackground)(self.task.to_device, device)

    def _workers(self, dataset: Dataset[Any]) -> Workers:
        data, on_gpu = self.config.data, self.world.device.type == "cuda"
        num_workers = data.num_workers
        if num_workers is None:
            num_workers = default_num_workers(dataset, self.world.cores, on_gpu=on_gpu)
        return Workers(num_workers, data.prefetch_factor, data.pin_memory and on_gpu)

    def _prepared_task(self) -> Task:
        task = build_trained_task(self.config)
        if self.world.local_rank == 0:
            # it may draw only where there is something to prepare: not on all ranks, and not on a resume
            with random_states_restored(self.world.gpus):
                task.prepare()
        self.world.barrier()
        return task

    def _require_same_training(self) -> None:
        """Refuse ranks that would plan different steps; collective."""
        config, comparison = self.config, RankComparison(self.world)
        comparison.add("seed", config.seed, SAME_CONFIGURATION)
        for key, setting in asdict(config.trainer).items():
            comparison.add(f"trainer.{key}", setting, SAME_CONFIGURATION)
        comparison.add("the losses", losses_of(named_optimizers(config.optimizer)), SAME_CONFIGURATION)
        comparison.add_dataset("training", self.train_data)
        comparison.require_same()

    def _require_same_samples(self) -> None:
        """Refuse ranks whose training samples differ, or are in another order; collective."""
        if self.world.control is None:
            return
        comparison = RankComparison(self.world)
        with random_states_restored(self.world.gpus):
            first = self._order()(0, np.arange(min(self.plan.num_samples, NUM_ORDERED)))
        comparison.add("the order of the training samples", listed(first, shown=NUM_ORDERED), SAME_ORDER)
        comparison.require_same()
        self._check_samples("training", self.train_data, self.config.seed)

    def _check_samples(self, kind: str, dataset: Dataset[Any], seed: int) -> None:
        workers = self._workers(dataset)
        collate, stop = self.task.collate_fn, self._stop
        check = SampleCheck(dataset, self.world, seed=seed, collate_fn=collate, workers=workers, stop=stop)
        # a loading process doesn't change the task's state in this process
        with nullcontext() if workers.num_workers else self.task_state.restored():
            check(kind)

    def _warn_of_single_samples(self) -> None:
        """Log a warning before the first step if a batch norm, whose variance needs two, will get a single sample."""
        plan, world = self.plan, self.world
        norms = [part for part in self.model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
        # one that is synchronised computes it over the samples of all ranks
        own = [norm for norm in norms if norm.training and (world.size == 1 or not isinstance(norm, nn.SyncBatchNorm))]
        reached = self.num_samples is not None and self.total_steps >= plan.steps_per_epoch
        if own and reached and plan.ends_with_single_samples and world.is_rank_zero:
            log.warning(
                "the last step of each epoch (step %d) gives %s a single sample, of which %s can't compute a variance: "
                "set data.drop_last=true, which leaves that step out",
                plan.steps_per_epoch,
                "a rank" if world.size > 1 else "the model",
                type(own[0]).__name__,
            )

    def _batch_plan(self) -> BatchPlan:
        trainer, degree = self.config.trainer, self.world.pipeline_size
        micro_batch_size = micro_batch_size_of(self.config, self.world.data_size, degree)
        num_samples = self._planned_samples()
        if num_samples < trainer.global_batch_size:
            log.warning(
                "trainer.global_batch_size=%d is more than the %d training samples: each step takes them all",
                trainer.global_batch_size,
                num_samples,
            )
        per_step = trainer.global_batch_size // self.world.data_size // micro_batch_size
        if per_step < degree:
            log.warning(
                "a step has fewer micro-batches (%d) than its pipeline has groups of ranks (%d), so that some always "
                "wait: set a larger trainer.global_batch_size, or a smaller trainer.micro_batch_size than %d",
                per_step,
                degree,
                micro_batch_size,
            )
        return BatchPlan(
            num_samples=num_samples,
            global_batch_size=trainer.global_batch_size,
            micro_batch_size=micro_batch_size,
            world_size=self.world.data_size,
            drop_last=self.config.data.drop_last,
        )

    def _planned_samples(self) -> int:
        if self.num_samples is not None:
            return self.num_samples
        trainer = self.config.trainer
        if trainer.max_steps is None:
            kind = type(self.train_data).__name__
            raise TaskError(f"{kind} has no length: give it __len__, or set trainer.max_steps")
        return trainer.max_steps * trainer.global_batch_size

    def _order(self) -> Order:
        samples, seed = self.plan.num_samples, self.config.seed
        if is_stream(self.train_data):
            return sequential
        chosen = self.task.order(samples, seed)
        if chosen is not None:
            expected = getattr(chosen, "num_samples", samples)
            if expected != samples:
                name = type(chosen).__name__
                raise TaskError(f"order() returned a {name} for {expected} samples, but the data have {samples}")
            return chosen
        return ShuffledOrder(samples, seed) if self.config.data.shuffle else sequential

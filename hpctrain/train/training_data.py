"""The training data of one rank: its samples, planned, ordered, weighted and loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset

from hpctrain.attempt.lost_gpu import closing_unless_lost
from hpctrain.checkpoint.host_memory import plain_copy
from hpctrain.checkpoint.state import Stateful
from hpctrain.config.optimizer import losses_of, named_optimizers
from hpctrain.config.resources import micro_batch_size_of
from hpctrain.config.root import Config
from hpctrain.data.bookmark import Bookmark, Bookmarks
from hpctrain.data.fetch import BatchFetcher, dataset_length, default_num_workers
from hpctrain.data.loader import TrainLoader
from hpctrain.data.micro_batch import BatchTransfer, CopyInBackground, MicroBatch, MoveOnDemand, map_tensors
from hpctrain.data.order import Order, ShuffledOrder, sequential
from hpctrain.data.plan import BatchPlan
from hpctrain.data.stream import check_stream, describe_resume_cost, has_bookmarks, is_stream, streams_of
from hpctrain.data.workers import Workers
from hpctrain.errors import TaskError
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.phrases import counted, listed
from hpctrain.rank.determinism import random_states_restored
from hpctrain.rank.message import pack, unpack
from hpctrain.rank.stop_request import StopRequest
from hpctrain.rank.world import World
from hpctrain.tasks.task import Task
from hpctrain.train.loss_weights import LossWeights, build_loss_weights
from hpctrain.train.rank_comparison import SAME_CONFIGURATION, SAME_ORDER, RankComparison, SampleCheck
from hpctrain.train.task_state import TaskState

NUM_ORDERED = 16
"""Number of samples, in the order of the first epoch, that ranks compare at the start."""

log = logging.getLogger("hpctrain.train")


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The samples that a task trains on, and how they are planned, ordered, weighted and loaded.

    Attributes:
        config: of the run.
        task: whose samples they are.
        world: the ranks.
        dataset: the samples.
        num_samples: of the dataset; None for a stream without a length.
        stream_state: how far streams were read.
        loss_weights: of the micro-batches.
        plan: the batch arithmetic.
    """

    config: Config
    task: Task
    world: TrainingWorld
    dataset: Dataset[Any]
    num_samples: int | None
    stream_state: StreamState
    loss_weights: LossWeights
    plan: BatchPlan

    @property
    def total_steps(self) -> int:
        """The last step of the run: max_steps or max_epochs, whichever comes first."""
        trainer, epoch = self.config.trainer, self.plan.steps_per_epoch
        bounds = [trainer.max_steps, None if trainer.max_epochs is None else trainer.max_epochs * epoch]
        return min(bound for bound in bounds if bound is not None)

    @property
    def workers(self) -> Workers:
        """The loading processes of each rank, for these samples."""
        return self.workers_for(self.dataset)

    @cached_property
    def transfer(self) -> BatchTransfer | None:
        """Moves batches to the rank's GPU; None on a CPU."""
        device = self.world.device
        if device.type != "cuda":
            return None
        is_own = getattr(self.task.to_device, "__func__", None) is not Task.to_device
        return (MoveOnDemand if is_own else CopyInBackground)(self.task.to_device, device)

    def samples_seen(self, step: int) -> int:
        """Return the number of samples in the first `step` steps; call it only with the steps completed so far."""
        return self.loss_weights.samples_seen if self.loss_weights.vary else self.plan.samples_seen(step)

    def loader(self, start_step: int, bookmarks: Bookmarks | None = None) -> TrainLoader:
        """Return the loader of this rank's batches from a step on.

        Args:
            start_step: counted from 0.
            bookmarks: of `stream_state`, if the batches are trained on.
        """
        collate, weights = self.task.collate_fn, self.loss_weights
        fetcher = BatchFetcher(
            self.dataset,
            self.config.seed,
            collate,
            bookmarks=bookmarks,
            step_samples=self.plan.global_batch_size,
            counts=weights.vary or (weights.by_contents and collate is None),
        )
        return TrainLoader(
            fetcher,
            self._order(),
            self.plan,
            rank=self.world.share.number,
            start_step=start_step,
            workers=self.workers,
            weigh=weights.weigh if weights.vary else None,
        )

    @contextmanager
    def first_micro_batch(self, task_state: TaskState) -> Iterator[MicroBatch]:
        """Yield this rank's first micro-batch; afterwards, the task's state is as before.

        It is read once, before the first step: during the run, a second pass over a stream could move a file or a
        counter that it shares with the one that is trained on.

        Args:
            task_state: of the task.
        """
        with task_state.restored():
            first = self._first_micro_batch
            batch = map_tensors(lambda tensor: tensor, first.batch)  # new containers: a loss may change them
            if self.transfer is not None:
                batch = MoveOnDemand(self.task.to_device, self.world.device).finish(batch)
            yield first._replace(batch=batch)

    @cached_property
    def _first_micro_batch(self) -> MicroBatch:
        """It is on the CPU."""
        with closing_unless_lost(self.loader(0).micro_batches()) as micro_batches:
            first: MicroBatch = next(micro_batches)
        return first

    def workers_for(self, dataset: Dataset[Any]) -> Workers:
        """Return the loading processes for a dataset of the task."""
        data, on_gpu = self.config.data, self.world.device.type == "cuda"
        num_workers = data.num_workers
        if num_workers is None:
            num_workers = default_num_workers(dataset, self.world.cores, on_gpu=on_gpu)
        return Workers(num_workers, data.prefetch_factor, data.pin_memory and on_gpu)

    def require_same_samples(self, task_state: TaskState, stop: StopRequest | None) -> None:
        """Refuse ranks whose samples differ, or are in another order; collective.

        Args:
            task_state: of the task, which reading samples leaves as it is.
            stop: a request to stop ends the wait for the samples; None for no stop.

        Raises:
            TaskError: on every rank; names the difference.
        """
        if self.world.control is None:
            return
        comparison = RankComparison(self.world)
        with random_states_restored(self.world.gpus):
            first = self._order()(0, np.arange(min(self.plan.num_samples, NUM_ORDERED)))
        comparison.add("the order of the training samples", listed(first, max_names=NUM_ORDERED), SAME_ORDER)
        comparison.require_same()
        self.compare_samples("training", self.dataset, task_state, stop, seed=self.config.seed)

    def compare_samples(
        self, kind: str, dataset: Dataset[Any], task_state: TaskState, stop: StopRequest | None, *, seed: int
    ) -> None:
        """Refuse ranks whose samples of a dataset of the task differ; collective.

        Args:
            kind: `training` or `held-out`, for the message.
            dataset: of the task.
            task_state: of the task, which reading samples leaves as it is.
            stop: a request to stop ends the wait for the samples; None for no stop.
            seed: of the samples' random draws.

        Raises:
            TaskError: on every rank; names the sample.
        """
        if self.world.control is None:
            return
        workers, collate = self.workers_for(dataset), self.task.collate_fn
        check = SampleCheck(dataset, self.world, seed=seed, collate_fn=collate, workers=workers, stop=stop)
        # a loading process doesn't change the task's state in this process
        with nullcontext() if workers.num_workers else task_state.restored():
            check(kind)

    def _order(self) -> Order:
        samples, seed = self.plan.num_samples, self.config.seed
        if is_stream(self.dataset):
            return sequential
        order = self.task.order(samples, seed)
        if order is not None:
            expected = getattr(order, "num_samples", samples)
            if expected != samples:
                name = type(order).__name__
                raise TaskError(f"order() returned a {name} for {expected} samples, but the data have {samples}")
            return order
        return ShuffledOrder(samples, seed) if self.config.data.shuffle else sequential


def build_training_data(config: Config, task: Task, world: TrainingWorld) -> TrainingData:
    """Build the training data, and compare the facts from which the ranks plan their steps; collective.

    Args:
        config: of the run.
        task: makes the dataset.
        world: the ranks.

    Raises:
        TaskError: the dataset can't be used, or differs between ranks.
        ConfigError: the batch sizes don't fit it.
    """
    dataset = task.train_dataset()
    _require_same_plan(config, dataset, world)
    num_samples = dataset_length(dataset)
    return TrainingData(
        config=config,
        task=task,
        world=world,
        dataset=dataset,
        num_samples=num_samples,
        stream_state=build_stream_state(dataset, world),
        loss_weights=build_loss_weights(task, dataset, world),
        plan=_batch_plan(config, dataset, num_samples, world),
    )


def _require_same_plan(config: Config, dataset: Dataset[Any], world: TrainingWorld) -> None:
    """Refuse ranks that would plan different steps; collective."""
    comparison = RankComparison(world)
    comparison.add("seed", config.seed, SAME_CONFIGURATION)
    for key, setting in asdict(config.trainer).items():
        comparison.add(f"trainer.{key}", setting, SAME_CONFIGURATION)
    comparison.add("the losses", losses_of(named_optimizers(config.optimizer)), SAME_CONFIGURATION)
    comparison.add_dataset("training", dataset)
    comparison.require_same()


def _batch_plan(config: Config, dataset: Dataset[Any], num_samples: int | None, world: TrainingWorld) -> BatchPlan:
    trainer, share = config.trainer, world.share
    micro_batch_size = micro_batch_size_of(config, share.count, share.num_positions)
    if num_samples is None:
        if trainer.max_steps is None:
            kind = type(dataset).__name__
            raise TaskError(f"{kind} has no length: give it __len__, or set trainer.max_steps")
        num_samples = trainer.max_steps * trainer.global_batch_size
    if num_samples < trainer.global_batch_size:
        log.warning(
            "trainer.global_batch_size=%d is more than the %d training samples: each step takes them all",
            trainer.global_batch_size,
            num_samples,
        )
    if remark := share.idle_warning(trainer.global_batch_size // share.count // micro_batch_size, micro_batch_size):
        log.warning(remark)
    return BatchPlan(
        num_samples=num_samples,
        global_batch_size=trainer.global_batch_size,
        micro_batch_size=micro_batch_size,
        world_size=share.count,
        drop_last=config.data.drop_last,
    )


class StreamState(Stateful):
    """Saves and restores the bookmarks of all ranks; each rank resumes with all of them, at any world size.

    Args:
        streams: of the training data; may be empty.
        world: the ranks.

    Attributes:
        bookmarks: of this rank; the training loader keeps them up to date.
    """

    is_collective: ClassVar[bool] = True

    def __init__(self, streams: Sequence[Any], world: World) -> None:
        self.bookmarks = Bookmarks()
        self._world = world
        self._num_streams = len(streams)
        self._exists = any(map(has_bookmarks, streams))

    def state(self) -> dict[str, Any]:
        """Return the newest bookmark of each stream at rank zero; None elsewhere, and without such streams; collective.

        Returns:
            ``streams``: ``num_streams``, and ``bookmarks``, each with the fields of a `Bookmark`.

        Raises:
            TaskError: a stream's state can't be stored in a checkpoint; the message names the value's place.
        """
        if not self._exists:
            return {"streams": None}
        bookmarks = _storable(self.bookmarks)
        if self._world.size > 1:
            packets = self._world.gather_bytes(pack({"bookmarks": bookmarks}))
            if packets is None:
                return {"streams": None}
            entries = (entry for data in packets for entry in unpack(data)["bookmarks"])
            bookmarks = _storable(Bookmarks(Bookmark(**entry) for entry in entries))
        return {"streams": {"num_streams": self._num_streams, "bookmarks": bookmarks}}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Begin with the bookmarks of a checkpoint; without any, or with those of other streams, at the start."""
        streams = saved.get("streams")
        if streams is None:
            return
        if streams["num_streams"] != self._num_streams:
            if self._world.is_rank_zero:
                log.warning(
                    "the checkpoint has the states of %s, and the data have %s now: they are read from their start, "
                    "and the run is not exact",
                    counted(streams["num_streams"], "stream"),
                    counted(self._num_streams, "stream"),
                )
            return
        # copies: the tensors of a loaded checkpoint are mapped from its files, which retention removes
        self.bookmarks = Bookmarks(Bookmark(**map_tensors(torch.clone, entry)) for entry in streams["bookmarks"])


def build_stream_state(dataset: Any, world: World) -> StreamState:
    """Build the state of the streams of a dataset, and log warnings about them; not collective.

    Args:
        dataset: the training data, with or without streams.
        world: the ranks.

    Raises:
        TaskError: a stream can be read only once, or is one rank's part.
    """
    streams = streams_of(dataset)
    for stream in streams:
        check_stream(stream)  # first: there is no point in warning about a stream that is refused
    if world.is_rank_zero:
        for remark in dict.fromkeys(map(describe_resume_cost, streams)):
            if remark is not None:
                log.warning(remark)
    return StreamState(streams, world)


def _storable(marks: Iterable[Bookmark]) -> list[dict[str, Any]]:
    """Copy the bookmarks into values that a checkpoint can store."""
    return [plain_copy(mark._asdict(), f"state_dict() of stream {mark.stream}: bookmark") for mark in marks]

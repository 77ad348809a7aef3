"""Weights of micro-batches, by which the losses of a step are averaged over accumulation and ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Mapping
from contextlib import closing
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from hpctrain.checkpoint.state import Stateful
from hpctrain.data.fetch import BatchDataset
from hpctrain.data.micro_batch import MicroBatch
from hpctrain.errors import TaskError
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.phrases import counted
from hpctrain.tasks.task import Task

log = logging.getLogger("hpctrain.train")


class LossWeights(Stateful):
    """Weighs micro-batches by their contents, if these can differ from the planned number of samples.

    They can if the user's code makes the batches (`Task.collate_fn`, a dataset's `get_batch`) or weighs them
    (`Task.loss_weight`). Otherwise nothing is weighed or exchanged, and the divisors are those of `BatchPlan`.

    Args:
        task: of the training.
        world: the ranks.
        vary: whether the weights can differ from the plan; the same on every rank.

    Attributes:
        by_contents: whether the run weighs batches by their contents; runs of earlier versions weigh them by the plan.
        vary: as given, until `load_state`.
        samples_seen: samples that batches held, over all ranks and since the start of the run, if they are counted.
        empty_steps: steps since the start of the run whose batches all had weight 0, so that nothing was updated.
    """

    def __init__(self, task: Task, world: TrainingWorld, *, vary: bool) -> None:
        self._task = task
        self._world = world
        self._has_own_weight = overrides(task, "loss_weight")
        self._has_own_count = overrides(task, "num_samples")
        self.by_contents = True
        self.vary = vary
        self._left_out = False
        self.samples_seen = 0
        self.empty_steps = 0

    @property
    def text(self) -> str:
        """Description of the weights for the log; empty if they can't vary."""
        if not self.vary:
            return ""
        kind = type(self._task).__name__
        return f"weighted by {kind}.loss_weight" if self._has_own_weight else "weighted by the samples in each batch"

    def state(self) -> dict[str, Any]:
        """Return how batches are weighed, and the counts if the weights can differ from the plan."""
        counts = {"samples_seen": self.samples_seen, "empty_steps": self.empty_steps}
        return {"loss_weights": {"by_contents": self.by_contents, **(counts if self.vary else {})}}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Continue from a checkpoint, and weigh batches as the run did when it began.

        The checkpoints of earlier versions, which weighed them by the plan, lack this state.
        """
        state = saved.get("loss_weights", {})
        self.by_contents = bool(state.get("by_contents", False))
        self.samples_seen = int(state.get("samples_seen", saved["samples_seen"]))
        self.empty_steps = int(state.get("empty_steps", 0))
        if self.vary and not self.by_contents:
            self.vary = False
            if self._world.is_rank_zero:
                log.info(
                    "the run began under an earlier version: its losses stay weighted by the planned numbers of samples"
                )

    def check_end(self, num_steps: int) -> None:
        """Warn about steps whose batches all had weight 0, at the end of the run.

        Raises:
            TaskError: every step is one of these.
        """
        if not self.empty_steps:
            return
        kind = type(self._task).__name__
        if self.empty_steps == num_steps:
            source = f"{kind}.loss_weight returned 0 for each" if self._has_own_weight else "each was empty"
            raise TaskError(f"no batch of the run had a weight ({source}), so nothing was trained: check the data")
        if self._world.is_rank_zero:
            steps = counted(num_steps, "step")
            log.warning("no batch had a weight in %d of the %s, which changed nothing", self.empty_steps, steps)

    def weigh(self, batch: Any, planned: int, num_delivered: int) -> tuple[float, int]:
        """Return the weight of a micro-batch, and the number of samples in it.

        Args:
            batch: on the CPU.
            planned: samples that the plan asks for; 0 for a stand-in, which has no weight.
            num_delivered: those of them that the batch holds (`count_samples`).

        Raises:
            TaskError: `Task.loss_weight` returned something other than a weight.
        """
        if not planned:
            return 0.0, 0
        num_samples = int(self._task.num_samples(batch)) if self._has_own_count else num_delivered
        return checked_weight(self._task, batch) if self._has_own_weight else float(num_samples), num_samples

    def of_steps(self, micro_batches: Generator[MicroBatch, None, None]) -> Generator[MicroBatch, None, None]:
        """Return the same micro-batches, with divisors for the weighted mean over their step; collective.

        With weights w, the gradients of a step are those of sum(w * loss) / sum(w), over all its micro-batches on all
        ranks. The sum of the weights is only known at the last micro-batch. So the divisors are computed from the first
        micro-batches of all ranks, which keeps the gradients about as large as those of the mean, and the last
        micro-batch has the factor by which to rescale them. Gradients of sums, divided at the end, would overflow in
        fp16, and to read all micro-batches first takes the memory of a global batch. If the weights are the planned
        numbers of samples, the divisors are the plan's, and the factor is 1.

        Args:
            micro_batches: of this rank, weighed, from the first one of a step on.
        """
        sums, is_first, unit = torch.zeros(3, dtype=torch.float64), True, 1.0
        with closing(micro_batches):
            for micro_batch in micro_batches:
                planned, weight = micro_batch.num_samples, micro_batch.weight
                assert weight is not None
                if self._world.share.is_counted:
                    sums += torch.tensor([weight, planned, micro_batch.num_delivered], dtype=torch.float64)
                total, gradient_factor = 0.0, 1.0
                if is_first or micro_batch.is_last:
                    total, total_planned, delivered = self._world.combine_(sums.clone(), "sum").tolist()
                if is_first:
                    unit = total / total_planned or 1.0
                if micro_batch.is_last:
                    # the only micro-batch of a step has the right divisor already
                    gradient_factor = 0.0 if not total else 1.0 if is_first else total_planned * unit / total
                    self.empty_steps += not total
                    self._count(int(total_planned), int(delivered))
                    sums.zero_()
                divisor = micro_batch.divisor * (planned * unit / weight) if weight else math.inf
                is_first = micro_batch.is_last
                yield micro_batch._replace(divisor=divisor, gradient_factor=gradient_factor)

    def _count(self, planned: int, delivered: int) -> None:
        """Add to the samples that were seen; warn once if some were left out."""
        self.samples_seen += delivered
        if delivered < planned and not self._left_out:
            self._left_out = True
            if self._world.is_rank_zero:
                log.warning(
                    "a step's batches hold %d of its %s: losses and rates are weighted by the samples in each batch, "
                    "which the task can count itself in num_samples",
                    delivered,
                    counted(planned, "sample"),
                )


def build_loss_weights(task: Task, dataset: Dataset[Any], world: TrainingWorld) -> LossWeights:
    """Build the weights of a training; collective: if those of one rank can vary, all ranks exchange theirs.

    Args:
        task: of the training.
        dataset: of the training.
        world: the ranks.
    """
    can_vary = overrides(task, "loss_weight") or _makes_own_batches(task, dataset)
    return LossWeights(task, world, vary=bool(world.combine_(torch.tensor([int(can_vary)]), "max").item()))


def overrides(task: Task, method: str) -> bool:
    """Whether a task overrides a method of `Task`; an attribute of that name that isn't callable doesn't count."""
    attribute = getattr(task, method)
    return callable(attribute) and getattr(attribute, "__func__", None) is not vars(Task)[method]


def _makes_own_batches(task: Task, dataset: Dataset[Any]) -> bool:
    # not a stream, whose reader returns as many samples as it is asked for, if necessary from the next epoch; nor
    # PyTorch's own collation, with which fewer samples than indices are an error
    own_get_batch = isinstance(dataset, BatchDataset) and not type(dataset).__module__.startswith("hpctrain.")
    return own_get_batch or (task.collate_fn is not None and task.collate_fn is not default_collate)


def checked_weight(task: Task, batch: Any) -> float:
    """Call `Task.loss_weight`; return the result as a number.

    Raises:
        TaskError: it isn't a finite number of at least 0.
    """
    weight: Any = task.loss_weight(batch)
    if isinstance(weight, Tensor) and weight.numel() == 1 and not weight.is_complex():
        weight = weight.item()
    if not isinstance(weight, Real) or not math.isfinite(weight) or weight < 0:
        returned = f"a tensor of shape {list(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
        raise TaskError(
            f"{type(task).__name__}.loss_weight must return a finite number of at least 0, such as the number of "
            f"tokens over which the loss is a mean, but it returned {returned}"
        )
    return float(weight)

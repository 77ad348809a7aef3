"""One step: a turn for each loss over the micro-batches of a global batch."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hpctrain.data.micro_batch import MicroBatch
from hpctrain.errors import TaskError
from hpctrain.phrases import counted, listed
from hpctrain.rank.world import World
from hpctrain.train.ema import Ema
from hpctrain.train.part_timer import PartTimer
from hpctrain.train.turn import Turn
from hpctrain.train.update import Update

FirstMicroBatch = Callable[[], AbstractContextManager[MicroBatch]]
"""Makes a context with the first micro-batch of the run, for passes of which nothing is kept."""

log = logging.getLogger("hpctrain.train")


class TrainStep:
    """Takes the turns of a step, and averages the weights after them.

    Args:
        turns: in their order. Their parameters are disjoint, and in a turn only its own require gradients.
        world: the ranks.
        first_micro_batch: for the pass before the first step, in which replicas reach their final layout.
        ema: averages the weights after each step; None for no average.

    Attributes:
        turns: in their order.
        ema: as given.
    """

    def __init__(
        self, turns: Sequence[Turn], world: World, first_micro_batch: FirstMicroBatch, ema: Ema | None = None
    ) -> None:
        self.turns = turns
        self.ema = ema
        self._world = world
        self._first_micro_batch = first_micro_batch
        self._only = turns[0] if len(turns) == 1 else None
        self._next_change: int | None = None

    @property
    def updates(self) -> list[Update]:
        """The updates of all optimizers, turn by turn."""
        return [update for turn in self.turns for update in turn.update.updates]

    @property
    def metrics(self) -> dict[str, float]:
        """Values to log of the last step; in fp16 reading them waits for the device."""
        return {name: value for turn in self.turns for name, value in turn.metrics.items()}

    @property
    def logged_names(self) -> list[str]:
        """The names under which the turns log, with `train/`."""
        of_turns = [name for turn in self.turns for name in (turn.loss.log_name, turn.loss.scale_name)]
        return of_turns + [name for update in self.updates for name in (update.norm_name, *update.metrics)]

    def total_loss(self, means: Mapping[str, float]) -> float | None:
        """Return the sum of the turns' mean losses; None if one is missing, since no batch had a weight.

        Turns that don't take part in every step are left out: the sum would depend on the steps since the last record.

        Args:
            means: since the last record, by logged name.
        """
        names = [turn.loss.log_name for turn in self.turns if turn.every_steps == 1]
        return sum(means[name] for name in names) if means.keys() >= set(names) else None

    def prepare(self, step: int) -> None:
        """Build the replicas for a training that starts after ``step`` steps, in their final layout; collective."""
        self.build_replicas(step)
        self._settle(self.turns)

    def build_replicas(self, step: int) -> list[Turn]:
        """Build the replicas for the parameters that are trained from step ``step`` on; collective.

        Returns:
            The turns whose replica had to be built.
        """
        built = []
        for turn in self.turns:
            # a replica is over what requires a gradient
            for parameter in itertools.chain.from_iterable(other.module.trained for other in self.turns):
                parameter.requires_grad = False
            if turn.module.prepare(step):
                built.append(turn)
        self.turns[-1].module.require_gradients(self._only is not None)
        changes = [turn.module.next_change(step) for turn in self.turns]
        self._next_change = min((change for change in changes if change is not None), default=None)
        return built

    def _unfreeze(self, step: int) -> None:
        built = self.build_replicas(step)
        for module in (turn.module for turn in built if self._world.is_rank_zero):
            size = f"{sum(map(torch.numel, module.added)):,} parameters in {counted(len(module.added), 'tensor')}"
            log.info("after step %d: unfroze %s: %s", step, size, listed(module.names_of(module.added), shown=4))
        self._settle(built)

    def _settle(self, turns: Sequence[Turn]) -> None:
        """Have the replicas of these turns reach their final layout; collective."""
        for turn in turns:
            turn.gradients.restart()
            with turn.module.gradients_required():
                turn.module.replica.settle(turn.module.loss_module, partial(self._throwaway_pass, turn))

    def _throwaway_pass(self, turn: Turn) -> None:
        with self._first_micro_batch() as micro_batch:
            turn.try_out(micro_batch)

    def __call__(self, step: int, micro_batches: Iterator[MicroBatch], timer: PartTimer | None = None) -> None:
        """Run step ``step``, counted from 0; collective.

        Args:
            step: its number.
            micro_batches: of this rank; those of the step are consumed.
            timer: times the parts of this step; None for no timing.
        """
        if step == self._next_change:
            self._unfreeze(step)
        if timer is not None:
            timer.begin()
        only = self._only
        updated = self._take_turns(step, micro_batches, timer) if only is None else only(step, micro_batches, timer)
        if updated and self.ema is not None:
            self.ema.update()

    def _take_turns(self, step: int, micro_batches: Iterator[MicroBatch], timer: PartTimer | None) -> bool:
        turns = [turn for turn in self.turns if (step + 1) % turn.every_steps == 0]
        supply, kept, updated = micro_batches, list[MicroBatch](), False
        if len(turns) > 1:
            supply = _keeping(micro_batches, kept)
        for turn in turns:
            turn.module.require_gradients(True)
            updated |= turn(step, supply, timer)
            turn.module.require_gradients(False)
            supply = iter(kept)
        return updated


@contextmanager
def unknown_optimizers_refused(step: TrainStep) -> Iterator[None]:
    """Inside the context, an optimizer that steps while a task computes a loss raises a TaskError.

    Args:
        step: of the training; its own optimizers may step.
    """
    own = {id(update.optimizer) for update in step.updates}

    def check(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if id(optimizer) in own:
            return
        for turn in step.turns:
            if turn.is_computing:
                raise TaskError(
                    f"{turn.loss.method} steps an optimizer of its own ({type(optimizer).__name__}), whose gradients "
                    "the ranks don't share and whose state no checkpoint has: name it in the configuration "
                    "(optimizer=named), with a method of the task that returns its loss"
                )

    handle = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def _keeping(micro_batches: Iterator[MicroBatch], kept: list[MicroBatch]) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a step, and keep them for the turns that follow."""
    for micro_batch in micro_batches:
        kept.append(micro_batch)
        yield micro_batch
        if micro_batch.is_last:
            return

"""One step: a turn for each loss over the micro-batches of a global batch, and the updates that follow from it."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hpctrain.config.precision import NumberFormats
from hpctrain.data.micro_batch import MicroBatch, map_tensors
from hpctrain.errors import TaskError
from hpctrain.metrics.meter import Meter
from hpctrain.parallel.local_part import whole
from hpctrain.parallel.replica import Call
from hpctrain.phrases import counted, listed
from hpctrain.rank.world import World
from hpctrain.tasks.contract import Scalar, split_loss
from hpctrain.tasks.task import Task
from hpctrain.train.ema import Ema
from hpctrain.train.precision import autocasting
from hpctrain.train.task_log import TRAIN_PREFIX, AttachedLog
from hpctrain.train.task_state import TaskState
from hpctrain.train.trained_module import EmptyPass, GradientCheck, TrainedModule, zero_of
from hpctrain.train.update import JointUpdate, Update

if TYPE_CHECKING:
    from hpctrain.train.profiling.sampler import PartTimer

FirstMicroBatch = Callable[[], AbstractContextManager[MicroBatch]]
"""Makes a context with the first micro-batch of the run, for passes of which nothing is kept."""

log = logging.getLogger("hpctrain.train")


@dataclass(frozen=True)
class Loss:
    """A loss of the task: the method that computes it, and where it is logged.

    Attributes:
        task: computes the loss.
        meter: collects the loss and the logged scalars.
        task_log: of the task.
        precision: the number formats, which decide the autocast.
        device: of the model, or of its first part.
        function: name of the task's method.
        name: of the loss among several, for its metrics; empty for the only one.
        makes_whole: whether to gather results that are DTensors, as of a model that divides its outputs among ranks.
    """

    task: Task
    meter: Meter
    task_log: AttachedLog
    precision: NumberFormats
    device: torch.device
    function: str = "loss"
    name: str = ""
    makes_whole: bool = False

    @property
    def method(self) -> str:
        """The task's class and method, for messages."""
        return f"{type(self.task).__name__}.{self.function}"

    @property
    def suffix(self) -> str:
        """The end of every name under which this loss is logged; empty for the only loss."""
        return f"/{self.name}" if self.name else ""

    @property
    def log_name(self) -> str:
        """The name under which the mean loss is logged."""
        return f"train/loss{self.suffix}"

    @property
    def scale_name(self) -> str:
        """The name under which the loss scale is logged."""
        return f"train/loss_scale{self.suffix}"


@dataclass(eq=False)
class Turn:
    """Accumulates the gradients of one loss over a global batch, and updates the weights that this loss trains.

    Gradients are those of the mean loss over the step's samples, at any world size and accumulation. The replica
    decides when they are reduced over the ranks. The turn steps the optimizers, and not the task: accumulation, loss
    scale, clipping and exact resumes would otherwise be the task's.

    Attributes:
        loss: whose gradients are accumulated.
        module: computes the loss, and has the parameters that the turn trains.
        update: of the optimizers that step for this loss.
        gradient_check: checks that the parameters get gradients.
        task_state: of the task; None for a task without one.
        every_steps: steps from one turn to the next. So several steps of a critic for each of its generator need no
            data order of their own: a step is one global batch.
        is_computing: whether the task's method is running.
    """

    loss: Loss
    module: TrainedModule
    update: JointUpdate
    gradient_check: GradientCheck
    _: KW_ONLY
    task_state: TaskState | None = None
    every_steps: int = 1
    is_computing: bool = field(default=False, init=False)
    _checked_names: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        compute: Callable[[nn.Module, Any], Any] = getattr(self.loss.task, self.loss.function)
        self._compute = autocasting(compute, self.loss.precision, self.loss.device)
        self._is_on_host = self.loss.device.type == "cpu"
        self._log_name = self.loss.log_name

    @property
    def metrics(self) -> dict[str, float]:
        """Values to log of the last updates; in fp16 reading them may wait for the device."""
        update = self.update
        return update.metrics | ({} if update.scaler is None else {self.loss.scale_name: update.loss_scale})

    def __call__(self, step: int, micro_batches: Iterator[MicroBatch], timer: PartTimer | None) -> bool:
        """Take the turn in step ``step``, counted from 0; collective.

        Args:
            step: its number.
            micro_batches: of this rank; those of the step are consumed.
            timer: times the parts of this step; None for no timing.

        Returns:
            Whether weights were updated.
        """
        self.update.begin(step)
        module = self.module
        gradient_factor = module.replica.accumulate(self, step, micro_batches, module.accumulating, timer)
        # not after a step in which no micro-batch has a weight: it updates nothing
        if self.gradient_check.is_due and gradient_factor:
            self.gradient_check.check()
        updated = self.update(gradient_factor)
        if timer is not None:
            timer.mark("optimizer")
        return updated

    def compute(self, micro_batch: MicroBatch, timer: PartTimer | None) -> None:
        """Add the gradients of a micro-batch to those of the step, and its loss to the meter; collective.

        Args:
            micro_batch: of this rank.
            timer: times the parts of this step; None for no timing.
        """
        if micro_batch.weight == 0:
            self._run_empty_pass(micro_batch)
            if timer is not None:
                timer.mark("backward")
            return
        module = self.module
        loss = module.loss_module(partial(self.compute_loss, micro_batch))
        if timer is not None:
            timer.forward_done(module.unfrozen, synchronises=module.ddp is not None and micro_batch.is_last)
        self.add_gradients(loss, micro_batch)
        if self.loss.task_log.scalars:
            self.add_late_scalars(micro_batch)
        if timer is not None:
            timer.backward_done()

    def begin_parts(self, micro_batches: Sequence[MicroBatch], timer: PartTimer | None) -> _PartPasses:
        """Return the passes of a step for a rank that computes parts of them.

        Args:
            micro_batches: of the step.
            timer: times the parts of this step; None for no timing.
        """
        if self.update.scaler is not None:
            # GradScaler makes its scale when it first scales something, and only one rank scales a loss
            self.update.scaler.scale(torch.zeros((), device=self.loss.device))
        return _PartPasses(self, micro_batches, timer)

    def compute_loss(self, micro_batch: MicroBatch, model: nn.Module, *, is_logged: bool = True) -> Tensor:
        """Compute the loss, and add it to the meter; the replica calls this in its forward pass.

        Args:
            micro_batch: of this rank.
            model: passed by the replica.
            is_logged: whether the loss belongs to a step, and this rank has the whole of it.

        Returns:
            The mean loss over the micro-batch, 0-d; alone, since DDP expects a gradient for all that its output needs.

        Raises:
            TaskError: the task's loss isn't a scalar tensor, or a mapping with one; or another loss logs the same name.
        """
        batch = micro_batch.batch
        if not (self._is_on_host or micro_batch.on_device):
            batch = self.loss.task.to_device(batch, self.loss.device)
        elif self.loss.name:
            # new containers around the same tensors: a loss that changes a dict or list must not affect the next turn
            batch = map_tensors(lambda tensor: tensor, batch)
        scalars: Mapping[str, Scalar] = {}
        self.is_computing = True
        try:
            loss = self._compute(model, batch)
        finally:
            self.is_computing = False
        if self.loss.makes_whole:
            # clones, because FSDP2 warns about views, which changes in place would corrupt
            loss = map_tensors(lambda value: whole(value).clone(), loss)
        if not isinstance(loss, Tensor) or loss.ndim:
            method, own_names = self.loss.method, self.loss.task_log.own_names
            loss, scalars = split_loss(method, loss, self._checked_names, own_names)
        task_log = self.loss.task_log
        if self.loss.name and (scalars or task_log.scalars):
            task_log.require_one_turn(self.loss.method, scalars)
        if is_logged:
            weight = micro_batch.num_samples if micro_batch.weight is None else micro_batch.weight
            # with weight 0, the micro-batch only takes part in the collectives
            if weight:
                self.loss.meter.add_mean(self._log_name, loss, weight)
                if scalars and task_log.callback_scalars:
                    task_log.require_not_of_callbacks(scalars)
                for name, value in scalars.items():
                    self.loss.meter.add_value(f"{TRAIN_PREFIX}{name}", value, weight)
            if task_log.scalars:
                task_log.add_to_meter(self.loss.meter, weight, scalars)
        if loss.grad_fn is None and self.gradient_check.is_awaited:
            loss = self.gradient_check.complete_constant(loss, model)
        return loss

    def compute_unlogged(self, call: Callable[..., Any], micro_batch: MicroBatch) -> Tensor:
        """Compute the mean loss, 0-d, in a pass that belongs to no step: what the task logs is discarded.

        Args:
            call: a `LossModule`, or DDP around one.
            micro_batch: of this rank.

        Raises:
            TaskError: the task's loss isn't a scalar tensor, or a mapping with one.
        """
        with self.loss.task_log.discarding():
            loss: Tensor = call(partial(self.compute_loss, micro_batch, is_logged=False))
        return loss

    def add_gradients(self, loss: Tensor, micro_batch: MicroBatch) -> None:
        """Add the gradients of a loss to those of the step; collective with parallel=mesh, or in the last micro-batch.

        Args:
            loss: the mean over the micro-batch, 0-d.
            micro_batch: over which it was computed.

        Raises:
            TaskError: the loss depends on none of the trained parameters, or misses some for which other ranks wait.
        """
        check = self.gradient_check
        backward = check.backward if micro_batch.is_last and check.is_awaited else self.update.backward
        try:
            backward(loss if micro_batch.divisor == 1 else loss / micro_batch.divisor)
        except RuntimeError:
            self._require_dependence(loss)
            raise

    def try_out(self, micro_batch: MicroBatch) -> None:
        """Compute the gradients of a micro-batch in a pass that belongs to no step, without loss scale; collective."""
        if micro_batch.weight == 0:
            self._run_empty_pass(micro_batch)
        else:
            loss = self.compute_unlogged(self.module.loss_module, micro_batch)
            self._require_dependence(loss)
            with self.loss.task_log.discarding():
                torch.autograd.backward(loss)
        if self.gradient_check.is_due:
            self.gradient_check.check()

    def _require_dependence(self, loss: Tensor) -> None:
        if loss.requires_grad:
            return
        names = listed(self.module.names_of(self.module.unfrozen), max_names=3)
        raise TaskError(
            f"{self.loss.method} depends on none of the parameters that it trains ({names}): compute it from them, "
            "without detach() and no_grad(), and return it without calling backward()"
        ) from None

    def add_late_scalars(self, micro_batch: MicroBatch) -> None:
        """Add what was logged in the backward pass: by a hook of a tensor, or by a layer that is computed once more."""
        task_log = self.loss.task_log
        if self.loss.name:
            task_log.require_one_turn(self.loss.method, ())
        weight = micro_batch.num_samples if micro_batch.weight is None else micro_batch.weight
        task_log.add_to_meter(self.loss.meter, weight, self._checked_names)

    def _run_empty_pass(self, micro_batch: MicroBatch) -> None:
        """Take part in the collectives of a pass, with a micro-batch of weight 0.

        The task's loss is computed only if the model exchanges something with other ranks.
        """
        module = self.module
        if module.exchanges_nothing:
            # an optimizer would decay a parameter that the step doesn't use if it had a gradient of 0
            if module.ddp is not None:
                of_first = module.ddp.find_unused_parameters
                self.update.backward(module.loss_module(partial(zero_of, of_first=of_first)))
            return
        empty = EmptyPass(shares_statistics=module.shares_statistics)
        with empty.forward(module.loss_module):
            loss = self.compute_unlogged(module.loss_module, micro_batch)
        with empty.backward(), self.loss.task_log.discarding():
            # infinite also in the pass before the first step, whose micro-batch has no computed divisor
            self.add_gradients(loss, micro_batch._replace(divisor=math.inf))


class _PartPasses:
    """The passes of a step through parts of a model; see `hpctrain.parallel.replica.PartPasses`."""

    def __init__(self, turn: Turn, micro_batches: Sequence[MicroBatch], timer: PartTimer | None) -> None:
        self._turn = turn
        self._micro_batches = micro_batches
        self._timer = timer
        self._empty: dict[int, EmptyPass] = {}

    def forward(self, call: Call, number: int, *, has_loss: bool, is_repeated: bool) -> Any:
        turn, micro_batch = self._turn, self._micro_batches[number]
        is_logged = has_loss and micro_batch.weight != 0
        with ExitStack() as contexts:
            if not is_logged:
                contexts.enter_context(turn.loss.task_log.discarding())
            if micro_batch.weight == 0:
                if number not in self._empty:
                    self._empty[number] = EmptyPass(shares_statistics=turn.module.shares_statistics)
                contexts.enter_context(self._empty[number].forward(turn.module.loss_module))
            if is_repeated and turn.task_state is not None:
                contexts.enter_context(turn.task_state.restored())
            output = call(partial(turn.compute_loss, micro_batch, is_logged=is_logged))
        if self._timer is not None:
            self._timer.mark("forward")
        return output

    def backward(self, output: Any, gradients: Sequence[Tensor] | None, number: int) -> None:
        micro_batch = self._micro_batches[number]
        accumulating = None if micro_batch.is_last else self._turn.module.accumulating
        empty, task_log = self._empty.get(number), self._turn.loss.task_log
        is_logged = gradients is None and micro_batch.weight != 0
        with (
            nullcontext() if accumulating is None else accumulating(),
            nullcontext() if empty is None else empty.backward(),
            nullcontext() if is_logged else task_log.discarding(),
        ):
            if gradients is None:
                self._turn.add_gradients(output, micro_batch)
            else:
                torch.autograd.backward(output, gradients)
        if is_logged and task_log.scalars:
            self._turn.add_late_scalars(micro_batch)
        if self._timer is not None:
            self._timer.mark("backward")


@dataclass(eq=False)
class TrainStep:
    """Takes the turns of a step, and averages the weights after them.

    Attributes:
        turns: in their order. Their parameters are disjoint, and in a turn only its own require gradients.
        world: the ranks.
        first_micro_batch: for the pass before the first step, in which replicas reach their final layout.
        ema: averages the weights after each step; None for no average.
    """

    turns: Sequence[Turn]
    world: World
    first_micro_batch: FirstMicroBatch
    ema: Ema | None = None
    _next_change: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._single_turn = self.turns[0] if len(self.turns) == 1 else None

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
        self._fix_layouts(self.turns)

    def build_replicas(self, step: int) -> list[Turn]:
        """Build the replicas for the parameters that are trained from step ``step`` on; collective.

        Each turn has one over its own parameters: over the whole model, with `find_unused_parameters`, DDP would reduce
        gradients that no optimizer uses.

        Returns:
            The turns whose replica had to be built.
        """
        built = []
        for turn in self.turns:
            # a replica is over what requires a gradient
            for parameter in itertools.chain.from_iterable(sibling.module.trained for sibling in self.turns):
                parameter.requires_grad = False
            if turn.module.prepare(step):
                built.append(turn)
        self.turns[-1].module.require_gradients(self._single_turn is not None)
        changes = [turn.module.next_change(step) for turn in self.turns]
        self._next_change = min((change for change in changes if change is not None), default=None)
        return built

    def _unfreeze(self, step: int) -> None:
        built = self.build_replicas(step)
        for module in (turn.module for turn in built if self.world.is_rank_zero):
            size = f"{sum(map(torch.numel, module.added)):,} parameters in {counted(len(module.added), 'tensor')}"
            log.info("after step %d: unfroze %s: %s", step, size, listed(module.names_of(module.added), max_names=4))
        self._fix_layouts(built)

    def _fix_layouts(self, turns: Sequence[Turn]) -> None:
        """Have the replicas of these turns reach their final layout; collective."""
        for turn in turns:
            turn.gradient_check.restart()
            with turn.module.gradients_required():
                turn.module.replica.fix_layout(turn.module.loss_module, partial(self._throwaway_pass, turn))

    def _throwaway_pass(self, turn: Turn) -> None:
        with self.first_micro_batch() as micro_batch:
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
        take = self._take_turns if self._single_turn is None else self._single_turn
        updated = take(step, micro_batches, timer)
        if updated and self.ema is not None:
            self.ema.update()

    def _take_turns(self, step: int, micro_batches: Iterator[MicroBatch], timer: PartTimer | None) -> bool:
        turns = [turn for turn in self.turns if (step + 1) % turn.every_steps == 0]
        supply, buffer, updated = micro_batches, list[MicroBatch](), False
        if len(turns) > 1:
            supply = _fill_buffer(micro_batches, buffer)
        for turn in turns:
            turn.module.require_gradients(True)
            updated |= turn(step, supply, timer)
            turn.module.require_gradients(False)
            supply = iter(buffer)
        return updated


def _fill_buffer(micro_batches: Iterator[MicroBatch], buffer: list[MicroBatch]) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a step, and keep them for the turns that follow."""
    for micro_batch in micro_batches:
        buffer.append(micro_batch)
        yield micro_batch
        if micro_batch.is_last:
            return

"""The log of a task in training, and its place on the task."""

from __future__ import annotations

import inspect
import os
from collections.abc import Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hpctrain.config.checkpoint import EVAL_PREFIX
from hpctrain.errors import TaskError
from hpctrain.metrics.media import CapturedMedium, capture
from hpctrain.metrics.media_files import MediaWriter
from hpctrain.metrics.meter import Meter, SilentMeter
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.tasks.contract import OWN_NAMES, Scalar, check_name, checked_scalar, is_scalar
from hpctrain.tasks.log import MediumKind, TaskLog
from hpctrain.tasks.position import Position
from hpctrain.tasks.task import Task

TRAIN_PREFIX = "train/"

REMEDY = "choose another name for one of them"


class PendingMedia:
    """Keeps the media of one step; a medium replaces an earlier one with the same name.

    Media aren't averaged, or sampled at random: neither survives an interruption exactly.
    """

    def __init__(self) -> None:
        self._writer: MediaWriter | None = None
        self._step = 0
        self._media: dict[str, CapturedMedium] = {}

    def add(self, step: int, name: str, captured: CapturedMedium) -> None:
        """Add a medium; those of an earlier step are handed to the writer.

        Args:
            step: to which it belongs.
            name: as logged, such as `eval/samples`.
            captured: its content.
        """
        if self._step != step:
            self.release()
        self._step = step
        self._media[name] = captured

    def release(self) -> None:
        """Hand the media so far to the writer."""
        if self._writer is not None:
            for name, captured in self._media.items():
                self._writer.put(self._step, name, captured)
        self._media.clear()

    @contextmanager
    def written_by(self, writer: MediaWriter | None) -> Iterator[None]:
        """Context manager that hands released media to a writer, and drops the rest; None drops them all."""
        self._writer = writer
        try:
            yield
        finally:
            self._writer = None
            self.drop()

    def drop(self) -> None:
        """Drop the media so far, as those of an evaluation that is abandoned."""
        self._media.clear()


@dataclass(frozen=True, slots=True)
class _Mode:
    """Treatment of what is logged: recorded, checked, discarded or refused.

    Attributes:
        prefix: of the names in records; empty to discard.
        is_ahead: whether it belongs to the step that is being computed, and not to the last complete one.
        is_trial: whether it is checked as in an evaluation, although it is discarded.
        is_deriving: whether scalars are refused, since the last batch of an evaluation is over.
        refusing_hook: the name of a callback's method in which everything is refused; empty elsewhere.
    """

    prefix: str = ""
    is_ahead: bool = True
    is_trial: bool = False
    is_deriving: bool = False
    refusing_hook: str = ""


class AttachedLog(TaskLog):
    """Collects what a task logs during a training; it discards everything until `training` begins.

    Args:
        kind: name of the task's class, for messages.
        position: of the training.
        total_steps: the last step of the run.
        every_steps: steps between records.
        is_rank_zero: whether media are written here, and not discarded.

    Attributes:
        scalars: logged since the last `add_to_meter`: name, value, and the number of values if the task gave it.
        own_names: what hpctrain itself logs as `train/NAME`.
        callback_scalars: by logged name, such as `train/acc`, the callback that logs a scalar: `callbacks.NAME`.
        media: that were logged for the current step, on rank zero.
    """

    def __init__(
        self, kind: str, position: Position, *, total_steps: int, every_steps: int, is_rank_zero: bool = True
    ) -> None:
        self.scalars: list[tuple[str, Scalar, Scalar | None]] = []
        self.own_names = OWN_NAMES
        self.callback_scalars: dict[str, str] = {}
        self.media = PendingMedia()
        self._kinds: dict[str, str] = {}
        self._methods: dict[str, str] = {}
        self._is_rank_zero = is_rank_zero
        self._kind = kind
        self._source = kind
        self._position = position
        self._total_steps = total_steps
        self._every_steps = every_steps
        self._mode = _Mode()
        self._checked: set[tuple[str, str]] = set()
        self._process = os.getpid()

    def reserve(self, names: Iterable[str]) -> None:
        """Refuse these logged names as well."""
        self.own_names |= {name.removeprefix(TRAIN_PREFIX) for name in names}

    @property
    def will_record(self) -> bool:
        """Whether a record follows this step."""
        if self._mode.prefix != TRAIN_PREFIX:
            return bool(self._mode.prefix) or self._mode.is_trial
        step = self.step
        return step % self._every_steps == 0 or step == self._total_steps

    @property
    def step(self) -> int:
        """The step to which a record belongs that is logged now."""
        return self._position.step + (self._mode.prefix == TRAIN_PREFIX and self._mode.is_ahead)

    def scalar(self, name: str, value: Tensor | float, *, count: Tensor | float | None = None) -> None:
        """Collect a scalar."""
        if self._mode.is_deriving:
            raise TaskError(f"{self._where('scalar')} was called after the last batch: return {name!r} from derive")
        if self._mode.refusing_hook:
            raise self._refused_error("scalar", name)
        if (self._mode.prefix, name) not in self._checked:
            if self._mode.is_trial:
                self._require_one_kind(f"{EVAL_PREFIX}{name}", "value")
            evaluates = self._mode.is_trial or self._mode.prefix == EVAL_PREFIX
            check_name(self._where("scalar"), name, frozenset() if evaluates else self.own_names)
            self._checked.add((self._mode.prefix, name))
        # called in each step: the place is put into words only where a check may fail
        if not is_scalar(value):
            value = checked_scalar(self._where("scalar"), name, value)
        if count is not None:
            count = checked_scalar(self._where("scalar"), "count", count)
        # a forked DataLoader worker has this very object, but no one reads it there
        if self._mode.prefix and self._process == os.getpid():
            self.scalars.append((name, value, count))

    def add_to_meter(self, meter: Meter, weight: float, returned: Container[str]) -> None:
        """Add the collected scalars of one batch, or of one hook, to a meter.

        Args:
            meter: of the training or of an evaluation.
            weight: of the batch; 0 for one that doesn't count, such as a stand-in.
            returned: names of the values that the method returned for the batch.

        Raises:
            TaskError: the method returned a value of the same name, or a callback and another one log it.
        """
        for name, value, count in self.scalars:
            if name in returned:
                raise self._duplicate_name_error(name)
            if self.callback_scalars or self._source != self._kind:
                self._require_one_source(name)
            if weight:
                meter.add_value(f"{self._mode.prefix}{name}", value, weight if count is None else count)
        self.scalars.clear()

    def require_one_turn(self, method: str, returned: Iterable[str]) -> None:
        """Refuse names that another loss logs, too.

        Args:
            method: the task's class and the method that computed a loss.
            returned: names of the values that it returned; the collected scalars count as well.

        Raises:
            TaskError: another method has logged or returned one of them.
        """
        for name in (*returned, *(name for name, _, _ in self.scalars)):
            _refuse_another(method, name, self._methods.setdefault(name, method))

    def require_not_of_callbacks(self, returned: Iterable[str]) -> None:
        """Refuse names of values that the task returned if a callback logs them.

        Raises:
            TaskError: a callback has logged one of them.
        """
        for name in returned:
            self._require_one_source(name)

    def _require_one_source(self, name: str) -> None:
        """Refuse the name of a scalar that a callback logs, too; that of a callback is its own from now on.

        A mean over two sources would describe neither.
        """
        logged = f"{self._mode.prefix}{name}"
        _refuse_another(self._source, logged, self.callback_scalars.get(logged, self._source))
        if self._source != self._kind:
            self.callback_scalars[logged] = self._source

    def _require_one_kind(self, name: str, kind: str) -> None:
        """Refuse a logged name under which another kind of thing was logged: a sink has one kind per name."""
        earlier = self._kinds.setdefault(name, kind)
        if earlier != kind:
            raise TaskError(f"{self._source} logs {name!r} as {earlier} and as {kind}: {REMEDY}")

    def _duplicate_name_error(self, name: str) -> TaskError:
        if self._source == self._kind:
            return TaskError(f"{self._kind} both returns {name!r} and logs it: {REMEDY}")
        return TaskError(f"{self._source} logs {self._mode.prefix + name!r}, as {self._kind} does: {REMEDY}")

    @contextmanager
    def training(self, media: MediaWriter | None = None) -> Iterator[None]:
        """Log, and not discard, in the context; entered by `TrainingLog.opened`, around all steps.

        Args:
            media: writes the media, on rank zero; None on other ranks.
        """
        with self.media.written_by(media), self._in(replace(self._mode, prefix=TRAIN_PREFIX)):
            yield

    def evaluation_mode(self) -> AbstractContextManager[None]:
        """Log as an evaluation in the context, if the training has begun; its media wait to be released or dropped."""
        self.media.release()
        return self._in(replace(self._mode, prefix=EVAL_PREFIX if self._mode.prefix else ""))

    def deriving(self) -> AbstractContextManager[None]:
        """Log media of the evaluation in the context, after its last batch; scalars are refused."""
        self.media.release()
        return self._in(replace(self._mode, prefix=EVAL_PREFIX if self._mode.prefix else "", is_deriving=True))

    @contextmanager
    def trying_out(self) -> Iterator[None]:
        """Check in the context what is logged as in an evaluation, and discard it."""
        try:
            with self._in(replace(self._mode, prefix="", is_trial=True)):
                yield
        finally:
            self._checked.clear()

    def discarding(self) -> AbstractContextManager[None]:
        """Return a context in which to discard what is logged, for passes that leave no trace."""
        return self._in(replace(self._mode, prefix="", refusing_hook=""))

    @contextmanager
    def in_callback(self, name: str) -> Iterator[None]:
        """Name a callback in the messages about what is logged in the context."""
        self._source = f"callbacks.{name}"
        try:
            yield
        finally:
            self._source = self._kind

    def in_hooks(self, *, computing: bool) -> AbstractContextManager[None]:
        """Log what callbacks log in the context, if the training has begun.

        Args:
            computing: whether it belongs to the step that is being computed, and not to the last complete one.
        """
        return self._in(replace(self._mode, prefix=TRAIN_PREFIX if self._mode.prefix else "", is_ahead=computing))

    def logging_refused(self, hook: str) -> AbstractContextManager[None]:
        """Refuse what a callback logs in the context: it would depend on the run's interruptions, or reach no record.

        Args:
            hook: the name of its method, for the message.
        """
        return self._in(replace(self._mode, refusing_hook=hook))

    def _refused_error(self, method: str, name: str) -> TaskError:
        place = f"{self._mode.refusing_hook} of {self._source}"
        problem = f"log.{method}({name!r}) was called in {place}, which belongs to no step"
        return TaskError(f"{problem}: log in before_step, after_backward, after_step or after_evaluation")

    @contextmanager
    def _in(self, mode: _Mode) -> Iterator[None]:
        before, outer = self._mode, self.scalars
        self._mode = mode
        self.scalars = []
        try:
            yield
        finally:
            self._mode = before
            self.scalars = outer

    def _media(self, kind: MediumKind, name: str, content: Any, **options: Any) -> None:
        if self._process != os.getpid():
            return
        if self._mode.refusing_hook:
            raise self._refused_error(kind, name)
        check_name(self._where(kind), name, frozenset())
        if prefix := EVAL_PREFIX if self._mode.is_trial else self._mode.prefix:
            self._require_one_kind(f"{prefix}{name}", kind)
        if not self._is_rank_zero:
            return
        # also where it is discarded: the evaluation before the first step shows mistakes
        captured = capture(self._where(kind), kind, content, options)
        if self._mode.prefix:
            self.media.add(self.step, f"{self._mode.prefix}{name}", captured)

    def require_no_medium(self, names: Iterable[str]) -> None:
        """Refuse logged names of values under which media were logged: a sink has one kind per name.

        Raises:
            TaskError: a medium was logged under one of them.
        """
        for name in names:
            if name in self._kinds:
                self._require_one_kind(name, "value")

    def _where(self, method: str) -> str:
        return f"{self._source}.log.{method}"


def build_meter(world: TrainingWorld, *names: str) -> Meter:
    """Make a meter over all ranks; of those that compute layers together, on the same samples, one counts.

    Args:
        world: the ranks.
        names: metrics that are in every result.
    """
    reduce = world.sum_ if world.size > 1 else None
    kind = Meter if world.share.is_counted else SilentMeter
    return kind(world.device, reduce, names=names, gather_names=world.union)


def _refuse_another(source: str, name: str, owner: str) -> None:
    if owner != source:
        raise TaskError(f"{source} logs {name!r}, as {owner} does: {REMEDY}")


def attach(task: Task, log: AttachedLog, position: Position) -> None:
    """Give a task its log and position; one whose class or instance has its own attribute of that name keeps it."""
    for name, value in (("log", log), ("position", position)):
        if inspect.getattr_static(task, name) is vars(Task)[name]:
            # not setattr: a task may be a frozen dataclass
            object.__setattr__(task, name, value)

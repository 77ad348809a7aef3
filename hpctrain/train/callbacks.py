"""The callbacks of a run: built, called, saved and restored."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from hpctrain.attempt.lost_gpu import closing_unless_lost
from hpctrain.callbacks.callback import Callback
from hpctrain.callbacks.early_stopping import EarlyStopping
from hpctrain.callbacks.training import Training as WatchedTraining
from hpctrain.checkpoint.best import judging_metric
from hpctrain.checkpoint.host_memory import require_storable
from hpctrain.checkpoint.state import PlainNames, Stateful
from hpctrain.checkpoint.stored_tensor import whole_tensors
from hpctrain.config.checkpoint import EVAL_PREFIX
from hpctrain.config.task_checks import (
    HOOKS,
    STATE_METHODS,
    call_mismatch_error,
    incomplete_state_error,
    not_a_callback,
    not_plain_function_error,
    unknown_hook_error,
)
from hpctrain.data.loader import EvalLoader
from hpctrain.data.micro_batch import map_tensors
from hpctrain.errors import ConfigError, TaskError
from hpctrain.metrics.meter import Meter
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.parallel.trial_pass import buffers_and_rng_restored
from hpctrain.run.directory import RunDirectory
from hpctrain.train.build import instantiate
from hpctrain.train.evaluation import evaluating
from hpctrain.train.task_log import build_meter
from hpctrain.train.update import JointUpdate

if TYPE_CHECKING:
    from hpctrain.train.training import Training


class Hook(NamedTuple):
    """A hook that a callback overrides.

    Attributes:
        callback: the name of its entry.
        call: the method.
    """

    callback: str
    call: Callable[..., None]


Hooks = tuple[Hook, ...]
"""Those of one name, in the order of the callbacks."""

log = logging.getLogger("hpctrain.train")


class RunningTraining(WatchedTraining):
    """The training of one attempt, as its callbacks see it.

    Args:
        training: with its task, model and optimizers.
        directory: of the run.

    Attributes:
        own_log: `log`, by its own type.
        update: whose gradients `after_backward` sees.
    """

    def __init__(self, training: Training, directory: RunDirectory) -> None:
        self.callback_name = ""
        self.update = training.step.turns[0].update
        self.task = training.task
        self.model = training.network.replica.model
        self.position = training.position
        self.log = self.own_log = training.task_log
        self.config = training.config
        self.is_sharded = training.network.replica.is_shared
        self.rank = training.world.rank
        self.world_size = training.world.size
        self.device = training.world.device
        self.run_dir = Path(directory.path)
        self.metric, self.metric_mode = judging_metric(
            training.config.checkpoint, training.task.metric, training.task.metric_mode
        )
        self._training = training
        self._plain_names = PlainNames(training.module)

    def begin_update(self, update: JointUpdate) -> None:
        """Show callbacks the gradients of this update, before it is made."""
        self.update = update

    @property
    def loss_scale(self) -> float:
        """See `hpctrain.callbacks.Training`."""
        return self.update.loss_scale

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """See `hpctrain.callbacks.Training`."""
        return {self._plain_names(name): parameter for name, parameter in self._training.module.named_parameters()}

    def eval_samples(self, number: int) -> Any | None:
        """See `hpctrain.callbacks.Training`."""
        dataset = self._training.eval_data
        if dataset is None:
            return None
        loader = EvalLoader(dataset, number, rank=0, world_size=1, collate_fn=self.task.collate_fn)
        with (
            buffers_and_rng_restored(self.model, self._training.world),
            closing_unless_lost(loader.rounds(1)) as rounds,
        ):
            batch = next(rounds, None)
        return None if batch is None else self.task.to_device(batch, self.device)

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """See `hpctrain.callbacks.Training`."""
        training = self._training
        averaged = training.ema if self.config.trainer.eval_ema else None
        with (
            buffers_and_rng_restored(self.model, training.world),
            training.task_log.discarding(),
            evaluating(self.model, averaged, self.config.precision.formats, self.device),
            # after the average: it gathers the weights that are in place then
            training.network.replica.calls(),
        ):
            yield

    def weights(self) -> dict[str, Tensor]:
        """See `hpctrain.callbacks.Training`."""
        state = self._training.module.state_dict()
        tensors = {self._plain_names(name): value for name, value in state.items() if isinstance(value, Tensor)}
        # other ranks have them
        return {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}

    def end(self, reason: str) -> None:
        """See `hpctrain.callbacks.Training`."""
        self._training.ending.request(reason, callback=self.callback_name)


class Callbacks(Stateful):
    """The callbacks of one attempt, in the order of the configuration.

    Args:
        callbacks: by the names of their entries.

    Attributes:
        hooks: those that are overridden, by each name of `HOOKS`. The loop tests those of a step, and calls `run`.
    """

    def __init__(self, callbacks: Mapping[str, Callback]) -> None:
        self._callbacks = callbacks
        self._training: RunningTraining | None = None
        self.hooks: Mapping[str, Hooks] = {name: self._overridden_hooks(name) for name in HOOKS}

    def judged_metrics(self) -> dict[str, str | None]:
        """The metrics by which callbacks end the run, by their keys; None for the run's. To ask before `on_start`."""
        early = {name: callback for name, callback in self._callbacks.items() if isinstance(callback, EarlyStopping)}
        return {f"callbacks.{name}.metric": callback.metric for name, callback in early.items()}

    def require_evaluation(self, why_none: str, *, warns: bool) -> None:
        """Refuse callbacks that do nothing in a run without an evaluation, and warn of others that want one.

        Args:
            why_none: why nothing is evaluated.
            warns: whether this rank logs the warnings.

        Raises:
            ConfigError: early stopping would never act.
        """
        for name, _ in self.hooks["after_evaluation"]:
            callback = self._callbacks[name]
            if isinstance(callback, EarlyStopping):
                target = f"{type(callback).__module__}.{type(callback).__qualname__}"
                raise ConfigError(f"callbacks.{name}._target_", target, why_none, f"leave {name} out of callbacks")
            if warns:
                log.warning("callbacks.%s: its after_evaluation is never called: %s", name, why_none)

    def _overridden_hooks(self, hook: str) -> Hooks:
        return tuple(
            Hook(name, getattr(callback, hook))
            for name, callback in self._callbacks.items()
            if _overrides(callback, hook)
        )

    def start(self, training: Training, directory: RunDirectory) -> None:
        """Call `on_start`, before all other hooks.

        Args:
            training: what the callbacks watch, in every hook of this attempt.
            directory: of the run.
        """
        self._training = RunningTraining(training, directory)
        self.run_between_steps("on_start")

    def run(self, hooks: Hooks, meter: Meter, *, computing: bool = False) -> None:
        """Call hooks of a step.

        Args:
            hooks: of one name.
            meter: of the training, for the scalars that they log.
            computing: whether what they log belongs to the step that is computed.
        """
        assert self._training is not None
        with self._training.own_log.in_hooks(computing=computing):
            _call(hooks, self._training, meter)

    def run_between_steps(self, name: str) -> None:
        """Call hooks that belong to no step, in which nothing may be logged.

        Args:
            name: of the hooks: `on_start`, `after_save`, `on_stop` or `on_end`.
        """
        assert self._training is not None
        with self._training.own_log.logging_refused(name):
            _call(self.hooks[name], self._training, None)

    def before_updates(self, meter: Meter) -> Callable[[JointUpdate], None] | None:
        """Return what calls `after_backward` before the updates of a turn; None if no callback overrides it.

        Args:
            meter: of the training.
        """
        return partial(self._run_after_backward, meter) if self.hooks["after_backward"] else None

    def _run_after_backward(self, meter: Meter, update: JointUpdate) -> None:
        assert self._training is not None
        self._training.begin_update(update)
        self.run(self.hooks["after_backward"], meter, computing=True)

    def run_after_evaluation(self, world: TrainingWorld, means: Mapping[str, float]) -> dict[str, float]:
        """Call `after_evaluation`, and return the means of the scalars that it logs; collective.

        Args:
            world: the ranks.
            means: of the evaluation, by logged name.
        """
        metrics, meter = {name.removeprefix(EVAL_PREFIX): means[name] for name in means}, build_meter(world)
        assert self._training is not None
        with self._training.own_log.evaluation_mode():
            _call(self.hooks["after_evaluation"], self._training, meter, metrics)
        return meter.means()

    def check(self) -> None:
        """Check that the states can be saved.

        Raises:
            TaskError: one can't be stored in a checkpoint; the message names the value's place.
        """
        for name, callback in self._callbacks.items():
            state = callback.state_dict()
            where = f"callbacks.{name}: {type(callback).__name__}.state_dict()"
            if not isinstance(state, Mapping):
                raise TaskError(f"{where} must return a dict, but it returned a {type(state).__name__}")
            require_storable(state, where)

    def state(self) -> dict[str, Any]:
        """Return the states by name, without empty ones."""
        states = {name: callback.state_dict() for name, callback in self._callbacks.items()}
        return {"callbacks": {name: state for name, state in states.items() if state}}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Restore the states; a callback without one starts afresh."""
        states = saved.get("callbacks", {})
        for name, callback in self._callbacks.items():
            if states.get(name):
                # a copy: the tensors of a loaded checkpoint are mapped from its files, which retention removes
                callback.load_state_dict(map_tensors(lambda tensor: tensor.clone(), whole_tensors(states[name])))
        if ignored := sorted(states.keys() - self._callbacks.keys()):
            log.info("the checkpoint has the state of callbacks that the run no longer has: %s", ", ".join(ignored))


def build_callbacks(nodes: Mapping[str, Any]) -> Callbacks:
    """Build the callbacks of the configuration.

    Args:
        nodes: of the configuration, by name.

    Raises:
        ConfigError: an entry isn't a callback, has a method that looks like a hook and isn't one, or a hook that
            can't be called.
    """
    return Callbacks({name: _build(f"callbacks.{name}", node) for name, node in nodes.items()})


def _build(key: str, node: Mapping[str, Any]) -> Callback:
    callback, target = instantiate(key, node), node["_target_"]
    if not isinstance(callback, Callback):
        raise not_a_callback(key, target)
    for name in dir(type(callback)):
        if (error := unknown_hook_error(key, target, name)) is not None:
            raise error
    defined = [name for name in STATE_METHODS if _overrides(callback, name)]
    if (error := incomplete_state_error(key, target, defined)) is not None:
        raise error
    for hook in HOOKS:
        _require_callable(key, target, callback, hook)
    return callback


def _require_callable(key: str, target: str, callback: Callback, hook: str) -> None:
    method = getattr(callback, hook)
    arguments = inspect.signature(getattr(Callback, hook)).parameters.keys() - {"self"}
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError as error:
        raise call_mismatch_error(key, target, hook, HOOKS[hook], str(error)) from None
    if inspect.iscoroutinefunction(method):
        raise not_plain_function_error(key, target, hook, "a coroutine")
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise not_plain_function_error(key, target, hook, "a generator")


def _overrides(callback: Callback, name: str) -> bool:
    """Whether its class has a method of its own by this name, or its constructor has set one."""
    return name in vars(callback) or getattr(type(callback), name) is not getattr(Callback, name)


def _call(hooks: Hooks, training: RunningTraining, meter: Meter | None, *means: Mapping[str, float]) -> None:
    """Call hooks, and add to the meter what each of them logs.

    Args:
        hooks: of one name.
        training: what they watch.
        meter: None where nothing may be logged.
        means: of the evaluation, whose names are taken; none for other hooks.
    """
    reserved_names = means[0] if means else ()
    for hook in hooks:
        training.callback_name = hook.callback
        with training.own_log.in_callback(hook.callback):
            hook.call(training, *means)
            if meter is not None:
                training.own_log.add_to_meter(meter, 1, reserved_names)

"""Callbacks for the small task of these tests."""

import os
import signal
from typing import ClassVar

import torch

from hpctrain.callbacks import Callback


class Recorder(Callback):
    """Notes each call with the step; ends the run after a step, or at an evaluation."""

    calls: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, end_after=None, end_at=None):
        self.end_after = end_after
        self.end_at = end_at
        self.steps = 0

    def on_start(self, training):
        self.calls.append(("on_start", training.position.step))

    def before_step(self, training):
        self.calls.append(("before_step", training.position.step))

    def after_backward(self, training):
        assert all(parameter.grad is not None for parameter in training.parameters.values())
        self.calls.append(("after_backward", training.position.step))

    def after_step(self, training):
        assert all(parameter.grad is None for parameter in training.parameters.values())
        self.steps += 1
        self.calls.append(("after_step", training.position.step))
        training.log.scalar("steps", self.steps)
        if training.position.step == self.end_after:
            training.end("that is enough")

    def after_evaluation(self, training, metrics):
        self.calls.append(("after_evaluation", training.position.step))
        training.log.scalar("steps", self.steps)
        if training.position.step == self.end_at:
            training.end(f"seen {sorted(metrics)}")

    def after_save(self, training):
        self.calls.append(("after_save", training.position.step))

    def on_stop(self, training):
        self.calls.append(("on_stop", training.position.step))

    def on_end(self, training):
        self.calls.append(("on_end", training.position.step))

    def state_dict(self):
        return {"steps": self.steps, "tensor": torch.full((2,), float(self.steps))}

    def load_state_dict(self, state):
        assert state["tensor"].tolist() == [state["steps"]] * 2
        self.steps = state["steps"]


class Interrupted(Recorder):
    """Asks for a stop and for the end of the run after the same step."""

    def after_step(self, training):
        super().after_step(training)
        if training.position.step == 2 and self.steps == 2:
            os.kill(os.getpid(), signal.SIGTERM)


class Drawing(Callback):
    """Makes a pass as an evaluation does, which must leave no trace."""

    def after_evaluation(self, training, metrics):
        batch = training.eval_samples(3)
        with training.evaluation_mode():
            assert not torch.is_grad_enabled()
            assert not training.model.training
            training.task.loss(training.model, batch)
            torch.rand(7)
        assert training.model.training


class Failing(Callback):
    def after_step(self, training):
        raise ValueError("a mistake in a callback")


class Talking(Callback):
    """Logs in one hook, also in a pass that leaves no trace."""

    def __init__(self, hook, method):
        self.hook = hook
        self.method = method

    def on_start(self, training):
        self._log("on_start", training)

    def after_save(self, training):
        self._log("after_save", training)

    def on_stop(self, training):
        self._log("on_stop", training)

    def on_end(self, training):
        self._log("on_end", training)

    def _log(self, hook, training):
        with training.evaluation_mode():
            training.log.scalar("discarded", 1.0)
        if hook == self.hook:
            getattr(training.log, self.method)("mine", 1.0 if self.method == "scalar" else "words")


class Seeing(Callback):
    def after_evaluation(self, training, metrics):
        training.log.scalar("mine", 1.0)


class Naming(Callback):
    """Logs a scalar in one hook."""

    def __init__(self, name, hook="before_step", value=1.0):
        self.name = name
        self.hook = hook
        self.value = value

    def before_step(self, training):
        self._log("before_step", training)

    def after_evaluation(self, training, metrics):
        self._log("after_evaluation", training)

    def _log(self, hook, training):
        if hook == self.hook:
            training.log.scalar(self.name, self.value)


class FailingAtTheEnd(Callback):
    def on_end(self, training):
        raise ValueError("a mistake at the end")


class Unsaveable(Callback):
    def state_dict(self):
        return {"file": object()}

    def load_state_dict(self, state):
        """Never called."""


class Misspelt(Callback):
    def on_epoch_end(self, training):
        """Never called."""


class Inherited(Misspelt):
    """As its base class."""


class Short(Callback):
    def after_evaluation(self, training):
        """Lacks an argument."""


class Close(Callback):
    def aftr_step(self, training):
        """Never called."""


class Forgetful(Callback):
    def state_dict(self):
        return {}


class Async(Callback):
    async def after_step(self, training):
        """Never awaited."""


class Yielding(Callback):
    def after_step(self, training):
        yield


class SetLater(Callback):
    """Chooses a hook in its constructor."""

    def __init__(self):
        self.after_step = self._count
        self.steps = []

    def _count(self, training):
        self.steps.append(training.position.step)


class Other:
    """No callback."""


def make():
    return Other()

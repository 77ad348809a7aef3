"""Callbacks and schedules of a user's own, for runs that are killed."""

from __future__ import annotations

import os
import signal

import torch

from hpctrain.callbacks import Callback


class Killer(Callback):
    """KILL_AT=HOOK:STEP has every rank kill itself there."""

    def _kill(self, hook, training):
        if os.environ.get("KILL_AT") == f"{hook}:{training.position.step}":
            os.kill(os.getpid(), signal.SIGKILL)

    def before_step(self, training):
        self._kill("before_step", training)

    def after_evaluation(self, training, metrics):
        self._kill("after_evaluation", training)

    def on_end(self, training):
        self._kill("on_end", training)


class Following(Callback):
    """Keeps a running mean of the first weight, which each rank computes, and what the evaluations returned."""

    def __init__(self):
        self.mean = torch.zeros(())
        self.evaluations = []

    def after_step(self, training):
        weight = next(iter(training.parameters.values())).detach().mean().cpu()
        self.mean = self.mean.lerp(weight, 0.3)
        training.log.scalar("followed", self.mean.item() + training.rank)

    def after_evaluation(self, training, metrics):
        self.evaluations.append((training.position.step, metrics["loss"]))
        training.log.scalar("evaluations", len(self.evaluations))

    def state_dict(self):
        return {"mean": self.mean, "evaluations": self.evaluations}

    def load_state_dict(self, state):
        self.mean, self.evaluations = state["mean"], list(state["evaluations"])


def triangular(total_steps, low=0.1):
    return lambda step: low + (1 - low) * (1 - abs(2 * step / total_steps - 1))


def in_turn(optimizer, total_steps):
    parts = torch.optim.lr_scheduler
    rise = parts.LinearLR(optimizer, 0.1, total_iters=total_steps // 3)
    fall = parts.ExponentialLR(optimizer, 0.8)
    return parts.SequentialLR(optimizer, [rise, fall], [total_steps // 3])

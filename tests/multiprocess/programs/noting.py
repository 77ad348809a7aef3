"""A user's task that logs: names that differ by rank and come late, and media of all kinds."""

from __future__ import annotations

import os
import signal

import torch

from hpctrain.metrics import tensorboard
from tests.multiprocess.programs.rivals import Rivals
from tests.multiprocess.programs.trial import Trial

# every record, and not ten a second: runs that are compared must have the same
tensorboard._MIN_INTERVAL_S = 0.0


class Noting(Trial):
    """NOTING_ACT=RANK:CALL:SIGNAL has the n-th batch that a rank evaluates, from 1 on, begin with such a signal."""

    def __init__(self, **options):
        super().__init__(**options)
        self.evaluated = 0
        acts = [act.split(":") for act in os.environ.get("NOTING_ACT", "").split(",") if act]
        self.signals = {int(call): name for rank, call, name in acts if int(rank) == self.rank}

    def loss(self, model, batch):
        position, features = self.position, batch[0]
        loss = super().loss(model, batch)
        self.log.scalar(f"of_rank_{self.rank}", 0.1 * position.step + 0.7 * self.rank)
        if position.step >= 4:
            self.log.scalar("late", features.mean(), count=features.numel())
        if self.rank == position.step % 2:
            self.log.scalar("in_turn", loss.detach() ** 2)
        if self.log.will_record:
            self.log.histogram("features", features)
            self.log.table("table", ["step", "loss"], [[position.step, loss]])
        if position.step % 3 == 0:
            self.log.image("image", features)
        return {"loss": loss, "progress": position.progress, "epoch_was": position.epoch, "first": features[0, 0]}

    def evaluate(self, model, batch):
        self.evaluated += 1
        if self.evaluated in self.signals:
            os.kill(os.getpid(), getattr(signal, self.signals[self.evaluated]))
        self.log.scalar("first", batch[0][0, 0], count=1)
        self.log.text("text", f"{self.position.step}: {batch[2].tolist()}")
        self.log.audio("sound", torch.sin(batch[0].flatten()), sample_rate=8000)
        return super().evaluate(model, batch)


class NotingRivals(Rivals):
    """Logs in the turns of a critic and a generator."""

    def critic_loss(self, model, batch):
        self.log.scalar("position", self.position.progress)
        self.log.histogram("samples", batch[0])
        return super().critic_loss(model, batch)

    def generator_loss(self, model, batch):
        loss = super().generator_loss(model, batch)
        self.log.text("generated", f"after step {self.position.step} of rank {self.rank}: {batch[2].tolist()}")
        return {"loss": loss, f"of_rank_{self.rank}": 0.3 * self.position.step}

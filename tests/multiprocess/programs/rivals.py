"""A user's task with two losses, whose parameters are trained in turns."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from hpctrain.data import TensorBatches
from tests.multiprocess.programs.trial import FEATURES, Trial, network, table

NOISE = 4


class Pair(nn.Module):
    """A generator and a critic."""

    def __init__(self, batchnorm=False):
        super().__init__()
        norms = [[nn.BatchNorm1d(12)] if batchnorm else [] for _ in range(2)]
        self.generator = nn.Sequential(nn.Linear(NOISE, 12), *norms[0], nn.Tanh(), nn.Linear(12, FEATURES))
        self.critic = nn.Sequential(nn.Linear(FEATURES, 12), *norms[1], nn.LeakyReLU(0.2), nn.Linear(12, 1))


def critic_loss(generator, critic, real):
    fake = generator(torch.randn(len(real), NOISE)).detach()
    of_real, of_fake = critic(real), critic(fake)
    return binary_cross_entropy_with_logits(of_real, torch.ones_like(of_real)) + binary_cross_entropy_with_logits(
        of_fake, torch.zeros_like(of_fake)
    )


def generator_loss(generator, critic, real):
    of_fake = critic(generator(torch.randn(len(real), NOISE)))
    return binary_cross_entropy_with_logits(of_fake, torch.ones_like(of_fake))


class Rivals(Trial):
    """Fails as `Trial` does; each loss is a call."""

    def build_model(self):
        return Pair(self.options["batchnorm"])

    def train_dataset(self):
        return TensorBatches(*table(self.sizes[0]))

    def critic_loss(self, model, batch):
        self.called()
        loss = critic_loss(model.generator, model.critic, batch[0]) * self.factor
        return {"loss": loss, "real": batch[0].mean()}

    def generator_loss(self, model, batch):
        self.called()
        return generator_loss(model.generator, model.critic, batch[0])

    def loss(self, model, batch):
        return self.generator_loss(model, batch)

    def evaluate(self, model, batch):
        return {"loss": (critic_loss(model.generator, model.critic, batch[0]) * len(batch[0]), len(batch[0]))}


class Followed(nn.Module):
    """A student, and a teacher whose weights follow the student's in each forward pass, as MoCo's do."""

    def __init__(self):
        super().__init__()
        self.student = network()
        self.teacher = network().requires_grad_(False)

    def forward(self, features):
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
        return self.student(features), self.teacher(features)


class Distilled(Trial):
    """A student learns from the labels and from its teacher."""

    def build_model(self):
        return Followed()

    def loss(self, model, batch):
        self.called()
        student, teacher = model(batch[0])
        return cross_entropy(student, batch[1]) + mse_loss(student, teacher)

    def evaluate(self, model, batch):
        student, _ = model(batch[0])
        return {"loss": (cross_entropy(student, batch[1], reduction="sum"), len(batch[1]))}


class Meddler(Trial):
    """Steps an optimizer of its own in its loss."""

    def loss(self, model, batch):
        weight = torch.ones(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.sum().backward()
        optimizer.step()
        return super().loss(model, batch)

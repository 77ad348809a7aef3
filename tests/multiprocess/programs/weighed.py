"""Tasks whose batches hold fewer samples than were asked for, and whose losses are means over tokens."""

from __future__ import annotations

import os
import signal

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, default_collate

from hpctrain.tasks import Task

TOKENS, FEATURES, CLASSES = 3, 4, 5
SAMPLES = 48


def is_readable(index):
    """Of each 48 samples, single ones, a whole micro-batch, a rank's share, and a step of 12 can't be read."""
    return not (index in (1, 2, 13) or 6 <= index < 12 or 24 <= index < 36 or 40 <= index < 44)


def sample(index):
    draws = torch.Generator().manual_seed(index)
    features = torch.randn(TOKENS, FEATURES, generator=draws, dtype=torch.float64)
    labels = torch.randint(CLASSES, (TOKENS,), generator=draws)
    # of some samples all tokens are padding
    labels[torch.arange(TOKENS) >= index % (TOKENS + 1)] = -100
    return features, labels


class Readable(Dataset):
    draws_per_sample = False

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return sample(index) if is_readable(index) else None


class All(Readable):
    def __getitem__(self, index):
        return sample(index)


class Layer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, features):
        return self.linear(features).tanh()


def network(dtype="float64"):
    model = nn.Sequential(Layer(FEATURES, 16), Layer(16, 16), Layer(16, CLASSES))
    return model.to(getattr(torch, dtype))


class Weighed(Task):
    """WEIGHED_STOP is a call of the loss, counted from 1, in which rank zero sends itself SIGTERM."""

    def __init__(self, dtype="float64"):
        self.dtype, self.calls = dtype, 0

    def build_model(self):
        return network(self.dtype)

    def eval_dataset(self):
        return self.train_dataset()

    def tensor_parallel_plan(self):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return {"0.linear": ColwiseParallel(), "1.linear": RowwiseParallel()}

    def logits(self, model, batch):
        self.calls += 1
        if self.calls == int(os.environ.get("WEIGHED_STOP", "0")) and os.environ.get("RANK", "0") == "0":
            os.kill(os.getpid(), signal.SIGTERM)
        features, labels = batch
        # in two dimensions: DTensors of no samples can't be reshaped
        logits = model(features.to(getattr(torch, self.dtype)).reshape(-1, FEATURES))
        return logits.reshape(-1, TOKENS, CLASSES), labels


def mean_of_samples(logits, labels):
    """Over the samples, of the sum over their tokens; NaN over none."""
    sums = cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1)
    return sums.sum() / len(sums)


class Samples(Weighed):
    """A mean over samples, some of which the collate function leaves out."""

    def train_dataset(self):
        return Readable()

    def collate_fn(self, samples):
        kept = [each for each in samples if each is not None]
        if not kept:
            return torch.zeros(0, TOKENS, FEATURES, dtype=torch.float64), torch.zeros(0, TOKENS, dtype=torch.int64)
        return default_collate(kept)

    def loss(self, model, batch):
        return mean_of_samples(*self.logits(model, batch))

    def first_loss(self, model, batch):
        return self.loss(model, batch)

    def second_loss(self, model, batch):
        return {"loss": 3 * self.loss(model, batch), "three": 3.0}


class Tokens(Samples):
    """A mean over the tokens that aren't padding; NaN in value and gradient where all are."""

    def train_dataset(self):
        return All()

    def loss_weight(self, batch):
        return (batch[1] != -100).sum()

    def loss(self, model, batch):
        logits, labels = self.logits(model, batch)
        mask = labels != -100
        losses = cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return (losses * mask).sum() / mask.sum()


class OnOneRank(Samples):
    """Leaves samples out on rank 1 alone."""

    def __init__(self):
        super().__init__()
        self.collate_fn = None if os.environ["RANK"] == "0" else lambda samples: default_collate(samples[:1])

    def train_dataset(self):
        return All()

    def eval_dataset(self):
        return None


def expected(kind, steps, batch, clip=None, named=False):
    """Train by hand on whole batches; return the weights, and the loss of each step, None without samples."""
    torch.manual_seed(0)
    model = network()
    parameters = [list(model[:1].parameters()), list(model[1:].parameters())] if named else [list(model.parameters())]
    factors = (1, 3) if named else (1,)
    optimizers = [torch.optim.AdamW(each, lr=0.01) for each in parameters]
    losses = []
    for step in range(steps):
        indices = [index % SAMPLES for index in range(step * batch, (step + 1) * batch)]
        chosen = [sample(index) for index in indices if kind == "Tokens" or is_readable(index)]
        total = None
        for optimizer, own, factor in zip(optimizers, parameters, factors, strict=True):
            weight = sum(int((labels != -100).sum()) for _, labels in chosen) if kind == "Tokens" else len(chosen)
            if not weight:
                continue
            features, labels = (torch.stack(each) for each in zip(*chosen, strict=True))
            loss = factor * cross_entropy(model(features).transpose(1, 2), labels, reduction="sum") / weight
            for parameter, gradient in zip(own, torch.autograd.grad(loss, own), strict=True):
                parameter.grad = gradient
            if clip is not None:
                nn.utils.clip_grad_norm_(own, clip)
            optimizer.step()
            total = (total or 0.0) + loss.item()
        losses.append(total)
    return model.state_dict(), losses

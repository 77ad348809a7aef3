"""An evaluation whose every trace is counted: metrics, values per sample, state, draws and logged scalars."""

from __future__ import annotations

import torch
from torch.utils.data import IterableDataset

from hpctrain.parallel.local_part import whole
from hpctrain.tasks import Metric, PerSample
from tests.multiprocess.programs.doubled import Doubled


class Total(Metric):
    """The sum of what it was given, and how often."""

    def __init__(self):
        self.add_state("total", torch.zeros((), dtype=torch.float64), reduce="sum")
        self.add_state("calls", torch.zeros((), dtype=torch.float64), reduce="sum")

    def update(self, values):
        self.total += values.double().sum()
        self.calls += 1

    def compute(self):
        return {"total": float(self.total), "samples_per_call": float(self.calls > 0)}


class Unending(IterableDataset):
    """Sequences without a length."""

    def __init__(self, tensors):
        self.tensors = tensors

    def __iter__(self):
        return iter(self.tensors)


class Counted(Doubled):
    """Evaluates seven sequences, or a stream of them, and keeps how many it has seen."""

    def __init__(self, stream=False):
        self.stream = stream
        self.seen = 0

    def eval_dataset(self):
        dataset = super().eval_dataset()
        return Unending(dataset.tensors[0]) if self.stream else dataset

    def build_metrics(self):
        self.total = Total()
        return {"total": self.total}

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]

    def evaluate(self, model, batch):
        tokens = batch[0] if isinstance(batch, (tuple, list)) else batch
        self.seen += len(tokens)
        self.log.scalar("seen", 1.0)
        logits = model(tokens[:, :-1])
        firsts = whole(logits[:, 0, 0])
        self.total.update(firsts)
        torch.rand(3)
        return {"first": PerSample(firsts), "squares": (firsts.square().sum(), len(tokens))}

    def compute_metrics(self, samples):
        weights = torch.arange(1, len(samples["first"]) + 1, dtype=torch.float64)
        return {"weighted": float((samples["first"] * weights).sum())}

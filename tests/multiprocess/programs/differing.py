"""Ranks that have built something else than the others."""

from __future__ import annotations

import os
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from hpctrain.data import ShardedStream, ShuffledStream
from hpctrain.data.workers import Workers
from hpctrain.errors import TaskError
from hpctrain.tasks import Metric
from hpctrain.train.rank_comparison import RankComparison, SampleCheck
from hpctrain.train.task_metrics import TaskMetrics
from tests.multiprocess.programs.gloo_world import joined
from tests.multiprocess.programs.trial import FEATURES, Trial


class Total(Metric):
    def __init__(self, shape=()):
        self.add_state("total", torch.zeros(shape), reduce="sum")

    def update(self, numbers):
        self.total = self.total + numbers.sum()

    def compute(self):
        return self.total.sum()


class Samples(Dataset):
    """As a folder whose files each node lists in an order of its own; `kind` is how this rank reads them."""

    def __init__(self, kind=""):
        self.kind, self.numbers = kind, torch.randn(50, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return 50

    def __getitem__(self, index):
        sample = self.numbers[(49 - index) if self.kind == "reversed" else index]
        if self.kind == "missing":
            raise FileNotFoundError(index)
        if self.kind == "slow":
            time.sleep(2.5)
        draws = np.random.default_rng()
        changed = {
            "digits": lambda: (sample * (1 + 1e-6), index),  # as another processor computes them
            "label": lambda: (sample, index + (index == 49)),
            "unseeded": lambda: (sample + draws.normal(), index),
            "seldom": lambda: (sample * (2 if draws.random() < 0.5 else 1), index),  # augments one sample in two
            "seeded": lambda: (sample + torch.randn(()), index),
            "paths": lambda: f"/scratch/node{os.environ['RANK']}/{index}.png",
            "nan": lambda: torch.full((3,), torch.nan),
            "objects": lambda: [{f"text {number}" for number in range(20)}, object()],  # other orders and addresses
        }
        return changed.get(self.kind, lambda: (sample, index))()


class Stream(IterableDataset):
    """Reads every n-th sample from one of its own on if it splits itself by rank; the others read all of them."""

    def __init__(self, kind=""):
        self.kind, self.passes, self.position = kind, 0, 0

    def __iter__(self):
        self.passes += 1
        if self.kind == "unseeded":
            return (torch.tensor(np.random.default_rng().normal()) for _ in range(9))
        if self.kind == "short":
            return (torch.tensor(float(number)) for number in range(2))
        return (torch.tensor(float(number)) for number in range(self.kind == "split", 90, 1 + (self.kind == "split")))

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


STREAMS = {
    "": lambda kind: Stream(),
    "split": Stream,
    "short": Stream,
    "unseeded": Stream,
    "shuffled": lambda kind: ShuffledStream(Stream("split" if kind else ""), window=10**9, seed=1),
    "sharded": lambda kind: ShardedStream([Stream("split" if kind else ""), Stream()]),
}


def _model(kind):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    if kind == "shape":
        model[0] = nn.Linear(5, 3)
    if kind == "type":
        model.double()
    if kind == "frozen":
        model[0].bias.requires_grad = False
    if kind == "more":
        model.append(nn.Linear(3, 1))
    if kind == "buffer":
        model[1].register_buffer("seen", torch.zeros(2))
    if kind == "order":
        model[0].weight = model[0].__dict__["_parameters"].pop("weight")
    if kind == "ignored":
        model[0].register_parameter("own", nn.Parameter(torch.zeros(int(os.environ["RANK"]) + 1)))
    model._ddp_params_and_buffers_to_ignore = ["0.own"]
    return model


METRICS = {
    "": {"a": Total(), "b": Total()},
    "name": {"a": Total(), "c": Total()},
    "order": {"b": Total(), "a": Total()},
    "fewer": {"a": Total()},
    "shape": {"a": Total((3,)), "b": Total()},
}
DATASETS = {"": TensorDataset(torch.zeros(1200)), "length": TensorDataset(torch.zeros(1000)), "none": None}
DATASETS["class"] = type("Cached", (TensorDataset,), {})(torch.zeros(1200))
CASES = [
    *(("dataset", kind) for kind in DATASETS),
    *(("model", kind) for kind in ("", "shape", "type", "frozen", "more", "buffer", "order", "ignored")),
    *(("metrics", kind) for kind in METRICS),
    *(("samples", kind) for kind in ("", "reversed", "label", "missing", "slow", "digits")),
    *(("samples", kind) for kind in ("unseeded", "seldom", "seeded", "paths", "nan", "objects")),
    *(("stream", kind) for kind in STREAMS),
]
ON_ALL_RANKS = {"unseeded", "seldom", "seeded", "paths", "nan", "objects", "ignored"}


def be_rank(odd_rank, kinds):
    """Compare in one case of these after the other, in which one rank differs; return the errors by case."""
    world = joined()
    errors = {}
    for what, kind in kinds:
        own = kind if world.rank == odd_rank or kind in ON_ALL_RANKS else ""
        comparison, state = RankComparison(world), torch.get_rng_state()
        if what == "dataset":
            comparison.add_dataset("training", DATASETS[own])
        elif what == "model":
            comparison.add_model(_model(own))
        elif what == "metrics":
            TaskMetrics(METRICS[own], Trial(), world).add_to(comparison)
        try:
            comparison.require_same()
            dataset = Samples(own) if what == "samples" else STREAMS[kind](own) if what == "stream" else None
            for workers in (Workers(0), Workers(4))[: 1 if kind else 2] if dataset is not None else ():
                collate = list if kind == "objects" else None
                SampleCheck(dataset, world, seed=1, collate_fn=collate, workers=workers)("training")
                assert getattr(dataset, "passes", 0) == 0
        except TaskError as error:
            errors[f"{what} {kind}"] = str(error)
        assert what == "model" or torch.equal(torch.get_rng_state(), state)
    world.close()
    return errors


class Differing(Trial):
    """Rank one differs from the others in what `kind`, or DIFFERING, names."""

    def __init__(self, kind="", **options):
        super().__init__(**options)
        self.kind = (kind or os.environ.get("DIFFERING", "")) if self.rank == 1 else ""

    def _changed(self, dataset, name):
        if self.kind == f"no_{name}":
            return None
        if self.kind == f"{name}_length":
            return type(dataset)(*(tensor[:-1] for tensor in dataset.tensors))
        if self.kind == f"{name}_order":
            return type(dataset)(*(tensor.flip(0) for tensor in dataset.tensors))
        return dataset

    def train_dataset(self):
        return self._changed(super().train_dataset(), "train")

    def eval_dataset(self):
        return self._changed(super().eval_dataset(), "eval")

    def order(self, num_samples, seed):
        if self.kind == "order":
            return lambda epoch, positions: num_samples - 1 - positions + 0 * epoch
        return super().order(num_samples, seed)

    def build_model(self):
        model = super().build_model()
        if self.kind == "model":
            model[0] = nn.Linear(FEATURES, model[0].out_features, bias=False)
        return model

    def evaluate(self, model, batch):
        found = super().evaluate(model, batch)
        return {f"own_{name}": pair for name, pair in found.items()} if self.kind == "evaluate" else found

    def build_metrics(self):
        return {} if self.kind == "metrics" else {"total": Total((2,) if self.kind == "metric_state" else ())}

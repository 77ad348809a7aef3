"""Ranks that evaluate a task with metric objects and values per sample, on several datasets after each other."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from hpctrain.config.precision import FORMATS
from hpctrain.data.workers import Workers
from hpctrain.rank.agreement import Agreement
from hpctrain.rank.stop_request import StopRequest
from hpctrain.tasks import Metric, PerSample, Task
from hpctrain.train.evaluation import Evaluation
from tests.multiprocess.programs.evaluating import Numbers, Stream, loader_of, pass_of
from tests.multiprocess.programs.gloo_world import joined

KINDS = {"numbers": Numbers, "stream": Stream}


class Extremes(Metric):
    def __init__(self):
        self.add_state("total", torch.tensor([100.0, 0.0]), reduce="sum")
        self.add_state("count", torch.tensor(0), reduce="sum")
        self.add_state("lowest", torch.tensor(torch.inf), reduce="min")
        self.add_state("highest", torch.tensor(-torch.inf), reduce="max")
        self.add_state("shown", reduce="cat")

    def update(self, numbers):
        self.total += torch.stack([numbers.sum(), numbers.square().sum()])
        self.count += len(numbers)
        self.lowest = torch.minimum(self.lowest, numbers.min())
        self.highest = torch.maximum(self.highest, numbers.max())
        self.shown.append(numbers[::2])

    def compute(self):
        shown = torch.cat(self.shown)
        values = {name: getattr(self, name) for name in ("total", "count", "lowest", "highest")}
        return {**values, "num_shown": len(shown), "sum_shown": shown.sum()}


class Scoring(Task):
    def __init__(self, fails="", with_torchmetrics=False):
        self.fails, self.with_torchmetrics = fails, with_torchmetrics
        self.gathered = []

    def train_dataset(self):
        raise NotImplementedError

    def loss(self, model, batch):
        raise NotImplementedError

    def build_metrics(self):
        found = {"extremes": Extremes()}
        if self.with_torchmetrics:
            found |= torchmetrics_objects()
        self.objects = found
        return found

    def evaluate(self, model, batch):
        numbers = batch.flatten()
        self.objects["extremes"].update(numbers)
        if self.with_torchmetrics:
            score, label = scores_and_labels(numbers)
            for name in ("auc", "binned", "both", "above"):
                self.objects[name].update(score, label)
            self.objects["retrieval"].update(score, label, indexes=numbers.long() % 2)
            self.objects["mean"].update(score)
            self.objects["pearson"].update(score, label.float() + score)
            self.objects["classes"].update(numbers.long() % 3, numbers.long() % 2)
        large = torch.zeros(len(numbers), 100_000 if self.fails == "large" else 1)
        return {
            "sum": (numbers.sum(), len(numbers)),
            "numbers": PerSample(torch.stack([numbers, -numbers], 1)[:, :1]),
            "flags": PerSample(numbers > 2),
            "ragged": PerSample([torch.arange(int(number) % 3, dtype=torch.int16)[:, None] for number in numbers]),
            "large": PerSample(large.bfloat16()),
        }

    def compute_metrics(self, samples):
        if self.fails == "score":
            raise LookupError("no such class")
        self.gathered = {name: [each.flatten().tolist() for each in values] for name, values in samples.items()}
        self.dtypes = {name: str(values[0].dtype) for name, values in samples.items()}
        return {"first": samples["numbers"][0], "of": {"each": samples["flags"].double().mean(), "two": [1, 2.5]}}


def scores_and_labels(numbers):
    return (numbers * 37 % 11) / 11, (numbers.long() * 7 % 5) % 2


def torchmetrics_objects():
    import torchmetrics
    from torchmetrics import classification as c

    warnings.simplefilter("ignore")
    return {
        "auc": c.BinaryAUROC(),
        "binned": c.BinaryAUROC(thresholds=50),
        "both": torchmetrics.MetricCollection([c.BinaryAccuracy(), c.BinaryPrecision(), c.BinaryF1Score()]),
        "above": c.BinaryAccuracy() + 1.0,
        "mean": torchmetrics.MeanMetric(),
        "retrieval": torchmetrics.retrieval.RetrievalMAP(),
        "pearson": torchmetrics.PearsonCorrCoef(),
        "classes": c.MulticlassAccuracy(num_classes=3, average=None),
    }


def be_rank(num_samples, micro_batch_size, fails, with_torchmetrics, tried=0):
    world = joined()
    agreement = Agreement(world, StopRequest())
    agreement.agree_and_calibrate()
    results = {}
    for kind, dataset in KINDS.items():
        task = Scoring(fails, with_torchmetrics)
        model = nn.Linear(1, 1)
        loader = loader_of(dataset(num_samples), micro_batch_size, world, Workers(0))
        evaluation = Evaluation(pass_of(task, model, world), loader, precision=FORMATS["fp32"], max_gathered_mb=1)
        try:
            if tried:
                results[kind] = {"tried": evaluation.try_out(agreement, tried).means}
            else:
                # a second one begins afresh
                first, second = evaluation(agreement).means, evaluation(agreement).means
                results[kind] = {"means": first, "same": repr(first) == repr(second)}
                results[kind] |= {"gathered": task.gathered, "dtypes": getattr(task, "dtypes", None)}
                results[kind]["states"] = len(task.objects["extremes"].shown)
        except Exception as error:
            results[kind] = {"error": f"{type(error).__name__}: {error}"}
    world.close()
    return results

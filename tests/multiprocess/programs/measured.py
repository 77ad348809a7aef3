"""A task with metric objects and values per sample, that can be interrupted in an evaluation."""

from __future__ import annotations

import os
import signal

import torch

from hpctrain.tasks import Metric, PerSample
from tests.multiprocess.programs.trial import Trial


class Confusion(Metric):
    def __init__(self, num_classes):
        self.add_state("counts", torch.zeros(num_classes, num_classes), reduce="sum")
        self.add_state("largest", torch.tensor(-torch.inf), reduce="max")
        self.add_state("margins", reduce="cat")

    def update(self, logits, labels):
        self.counts.index_put_((labels, logits.argmax(1)), torch.ones(len(labels)), accumulate=True)
        self.largest = torch.maximum(self.largest, logits.max())
        self.margins.append(logits.max(1).values - logits.min(1).values)

    def compute(self):
        margins = torch.cat(self.margins)
        return {"recall": self.counts.diag() / self.counts.sum(1), "largest": self.largest, "margin": margins.median()}


class Measured(Trial):
    """MEASURED_STOP=CALL: this rank gets SIGTERM in its n-th `evaluate`, counted from 1 in each process."""

    metric, metric_mode = "median", "max"

    def __init__(self, with_torchmetrics=False, **options):
        super().__init__(**options)
        self.with_torchmetrics, self.evaluated = with_torchmetrics, 0
        self.stop_at = int(os.environ.get("MEASURED_STOP", "0"))

    def build_metrics(self):
        self.confusion = Confusion(3)
        found = {"confusion": self.confusion}
        if self.with_torchmetrics:
            from torchmetrics.classification import MulticlassAUROC

            self.auc = found["auc"] = MulticlassAUROC(3)
        return found

    def evaluate(self, model, batch):
        self.evaluated += 1
        if self.evaluated == self.stop_at and self.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        features, labels, numbers = batch
        logits = model(features)
        self.confusion.update(logits, labels)
        if self.with_torchmetrics:
            self.auc.update(logits, labels)
        ragged = [row[: number % 3] for number, row in zip(numbers.tolist(), logits, strict=True)]
        sums = super().evaluate(model, batch)
        return {**sums, "logits": PerSample(logits), "numbers": PerSample(numbers), "ragged": PerSample(ragged)}

    def compute_metrics(self, samples):
        assert samples["numbers"].tolist() == list(range(len(samples["numbers"])))
        assert [len(each) for each in samples["ragged"]] == [number % 3 for number in samples["numbers"].tolist()]
        return {"median": samples["logits"].median(0).values.max(), "tail": torch.cat(samples["ragged"]).sum()}

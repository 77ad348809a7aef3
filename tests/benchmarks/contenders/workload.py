"""What every contender trains, and the clock that all of them carry: nothing of hpctrain is imported here."""

from __future__ import annotations

import json
import os
import resource
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

BLOCK = 100
"""Steps per reading, in which each contender logs as often as it does by default."""


class Workload:
    """A model, its samples and its loss; `loss` reads the clock, once a step.

    Environment: WORKLOAD is `mlp` or `convnet`; STEPS is how many steps are done; REPORT is where the readings go.
    """

    def __init__(self) -> None:
        self.kind, self.steps = os.environ["WORKLOAD"], int(os.environ["STEPS"])
        self.shape, self.batch_size = {"mlp": ((64,), 32), "convnet": ((1, 28, 28), 64)}[self.kind]
        self.num_samples = 100 * self.batch_size
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.micro_batch_size = self.batch_size // self.world_size
        self.times = [0.0] * (self.steps + 1)
        self.calls = 0
        self.first_step_s, self.cpu_s = 0.0, 0.0

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        if self.kind == "mlp":
            return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(512, 10),
        )

    def samples(self) -> tuple[Tensor, Tensor]:
        draws = torch.Generator().manual_seed(1)
        features = torch.randn(self.num_samples, *self.shape, generator=draws)
        return features, torch.randint(0, 10, (self.num_samples,), generator=draws)

    def batches(self):
        """This rank's batches of an epoch, shuffled, as a loop written by hand takes them from memory."""
        features, labels = self.features, self.labels
        order = torch.randperm(self.num_samples, generator=self.draws)
        for begin in range(self.rank * self.micro_batch_size, self.num_samples, self.batch_size):
            chosen = order[begin : begin + self.micro_batch_size]
            yield features[chosen], labels[chosen]

    def epochs(self):
        """Batches without end."""
        self.load()
        while True:
            yield from self.batches()

    def load(self) -> None:
        self.features, self.labels = self.samples()
        self.draws = torch.Generator().manual_seed(2)

    def loss(self, model: nn.Module, features: Tensor, labels: Tensor) -> Tensor:
        self.tick()
        return cross_entropy(model(features), labels)

    def tick(self) -> None:
        calls = self.calls
        if calls <= self.steps:
            self.times[calls] = time.perf_counter()
        if calls == 1:
            self.first_step_s, self.cpu_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s(), time.process_time()
        self.calls = calls + 1

    def report(self) -> None:
        """Write the readings, on rank zero: once, when the last step is done."""
        self.tick()
        if self.rank:
            return
        first = max(self.steps // 5, 1)
        times = self.times[first : self.calls]
        block = min(BLOCK, max(len(times) // 4, 1))
        step_us = [(times[end] - times[end - block]) / block * 1e6 for end in range(block, len(times), block)]
        record = {
            "cpu_us": (time.process_time() - self.cpu_s) / (self.calls - 2) * 1e6,
            "step_us": statistics.median(step_us),
            "mean_us": (times[-1] - times[0]) / (len(times) - 1) * 1e6,
            "first_step_s": self.first_step_s,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        Path(os.environ["REPORT"]).write_text(json.dumps(record))

    def leave(self) -> None:
        """End the process without its exit handlers, which the readings don't include.

        At exit gloo's threads may outlive what they use, if rank zero and its store go first: about one run of
        forty then aborts with "terminate called without an active exception".
        """
        os._exit(0)


def started_s() -> float:
    """When this process began, in seconds since the machine did (proc(5), field 22)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")

"""What both contenders train on a GPU, and the clock that both carry."""

from __future__ import annotations

import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from workload import started_s

from hpctrain.models.gpt import GPT
from hpctrain.models.resnet import ResNet


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A model, its samples and its optimizer.

    Attributes:
        model: makes the model.
        batch_size: samples of a step.
        sample: shape of one sample's input.
        num_classes: exclusive bound of labels, or of tokens.
        optimizer: its class in torch.optim.
        options: of the optimizer.
        channels_last: whether images and weights are ordered so.
    """

    model: Callable[[], nn.Module]
    batch_size: int
    sample: tuple[int, ...]
    num_classes: int
    optimizer: str
    options: dict[str, float] = field(default_factory=dict)
    channels_last: bool = False


_SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-5}
_ADAMW = {"lr": 6e-4, "weight_decay": 0.1}
GPT2 = {"vocab_size": 50257, "context_length": 1024, "num_layers": 12, "num_heads": 12, "width": 768}
SMALL_GPT = {"vocab_size": 256, "context_length": 32, "num_layers": 2, "num_heads": 2, "width": 32}
KINDS = {
    "resnet50": Kind(
        model=ResNet,
        batch_size=128,
        sample=(3, 224, 224),
        num_classes=1000,
        optimizer="SGD",
        options=_SGD,
        channels_last=True,
    ),
    "gpt2": Kind(
        model=lambda: GPT(**GPT2),
        batch_size=16,
        sample=(1024,),
        num_classes=50257,
        optimizer="AdamW",
        options=_ADAMW,
    ),
}
TINY = {
    "resnet50": replace(
        KINDS["resnet50"], model=lambda: ResNet(18, num_classes=10), batch_size=4, sample=(3, 32, 32), num_classes=10
    ),
    "gpt2": replace(KINDS["gpt2"], model=lambda: GPT(**SMALL_GPT), batch_size=4, sample=(32,), num_classes=256),
}
"""For a try on a CPU: a toy of each kind."""


def kind_of(name: str, *, tiny: bool) -> Kind:
    return (TINY if tiny else KINDS)[name]


class GpuWorkload:
    """A model, its samples and its loss; `loss` reads the clock, and `save` the time for which training waits.

    Environment: MODEL is `resnet50` or `gpt2`; TINY=1 is a toy of it; COMPILED=1 compiles; DEVICE is `cuda` or `cpu`;
    STEPS is how many steps are done; BLOCK is after how many a save follows; REPORT is where the readings go.

    The readings of a block begin after the save that precedes it, and end before its own: a save isn't part of a step.
    Each reading waits for the GPU.
    """

    def __init__(self) -> None:
        self.kind = kind_of(os.environ["MODEL"], tiny=os.environ["TINY"] == "1")
        self.compiled = os.environ["COMPILED"] == "1"
        self.device = torch.device(os.environ["DEVICE"])
        self.steps = int(os.environ["STEPS"])
        self.block = int(os.environ["BLOCK"])
        self.num_samples = 8 * self.kind.batch_size
        self.calls = 0
        self.first_step_s = 0.0
        self.step_s: list[float] = []
        self.saves_s: list[float] = []
        self._began_s = 0.0

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.kind.model()

    def samples(self) -> tuple[Tensor, Tensor]:
        """Images of bytes with labels, or tokens with those that follow them."""
        draws = torch.Generator().manual_seed(1)
        count, shape = self.num_samples, self.kind.sample
        if len(shape) == 1:
            tokens = torch.randint(0, self.kind.num_classes, (count, shape[0] + 1), generator=draws)
            return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        images = torch.randint(0, 256, (count, *shape), generator=draws, dtype=torch.uint8)
        return images, torch.randint(0, self.kind.num_classes, (count,), generator=draws)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches without end, shuffled, in page-locked memory if there is a GPU."""
        features, labels = self.samples()
        draws = torch.Generator().manual_seed(2)
        while True:
            order = torch.randperm(self.num_samples, generator=draws)
            for chosen in order.split(self.kind.batch_size):
                batch = features[chosen], labels[chosen]
                yield tuple(map(Tensor.pin_memory, batch)) if self.device.type == "cuda" else batch

    def loss(self, model: Callable[[Tensor], Tensor], features: Tensor, labels: Tensor) -> Tensor:
        self._tick()
        given = features.float() / 255 if features.dtype == torch.uint8 else features
        return cross_entropy(model(given).flatten(0, -2), labels.flatten())

    def save(self, save: Callable[[], Any]) -> None:
        """Time a save between two steps."""
        self.synchronize()
        begin = time.perf_counter()
        save()
        self.saves_s.append(time.perf_counter() - begin)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _tick(self) -> None:
        call, self.calls = self.calls, self.calls + 1
        within = call % self.block
        if call != 1 and within not in (0, self.block - 1):
            return
        self.synchronize()
        if call == 1:
            self.first_step_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s()
        elif within == 0:
            self._began_s = time.perf_counter()
        elif call >= self.block:  # the first block warms up
            self.step_s.append((time.perf_counter() - self._began_s) / (self.block - 1))

    def report(self) -> None:
        """Write the readings."""
        on_gpu = self.device.type == "cuda"
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        first, *later = self.saves_s
        record = {
            "device": torch.cuda.get_device_name() if on_gpu else "CPU",
            "step_ms": statistics.median(self.step_s) * 1e3,
            "first_step_s": self.first_step_s,
            "peak_gb": (torch.cuda.max_memory_allocated() if on_gpu else resident) / 1e9,
            "first_save_s": first,
            "save_s": statistics.median(later),
        }
        Path(os.environ["REPORT"]).write_text(json.dumps(record))

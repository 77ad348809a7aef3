"""What all contenders train on a GPU, and the clock that all of them carry."""

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
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.flop_counter import FlopCounterMode

from hpctrain.models.gpt import GPT
from hpctrain.models.resnet import ResNet
from hpctrain.train.profiling.flops import peak_flops
from tests.benchmarks.contenders.workload import started_s


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
_TOKENS = {"vocab_size": 50257, "context_length": 1024}
GPTS = {
    "gpt2": {"num_layers": 12, "num_heads": 12, "width": 768},
    "gpt2-medium": {"num_layers": 24, "num_heads": 16, "width": 1024},
    "gpt2-xl": {"num_layers": 48, "num_heads": 25, "width": 1600},
}
"""Of 124 million, 355 million and 1.6 billion parameters (Radford et al. 2019)."""
SMALL_GPT = {"vocab_size": 256, "context_length": 32, "num_layers": 1, "num_heads": 2, "width": 32}
_RESNET = Kind(
    model=ResNet,
    batch_size=128,
    sample=(3, 224, 224),
    num_classes=1000,
    optimizer="SGD",
    options=_SGD,
    channels_last=True,
)


def _gpt(batch_size: int, **sizes: int) -> Kind:
    context_length, vocab_size = sizes["context_length"], sizes["vocab_size"]
    return Kind(
        model=lambda: GPT(**sizes),
        batch_size=batch_size,
        sample=(context_length,),
        num_classes=vocab_size,
        optimizer="AdamW",
        options=_ADAMW,
    )


KINDS = {
    "resnet50": _RESNET,
    "gpt2": _gpt(16, **_TOKENS, **GPTS["gpt2"]),
    "gpt2-medium": _gpt(8, **_TOKENS, **GPTS["gpt2-medium"]),
    "gpt2-xl": _gpt(4, **_TOKENS, **GPTS["gpt2-xl"]),
}
TINY = {
    "resnet50": replace(
        _RESNET, model=lambda: ResNet(18, num_classes=10), batch_size=4, sample=(3, 32, 32), num_classes=10
    ),
    **{name: _gpt(4, **SMALL_GPT) for name in GPTS},
}
"""For a try on a CPU: a toy of each kind."""


def kind_of(name: str, *, tiny: bool) -> Kind:
    return (TINY if tiny else KINDS)[name]


class GpuWorkload:
    """A model, its samples and its loss, and a clock that each update by an optimizer reads.

    Environment: MODEL is a name in `KINDS`; TINY=1 is a toy of it; COMPILED=1 compiles; DEVICE is `cuda` or `cpu`;
    STEPS is the number of steps; a save follows every BLOCK steps, and BLOCK=STEPS saves nothing; REPORT is where the
    readings go.

    The readings of a block begin after the save that precedes it, and end before its own: a save isn't part of a step.
    Each reading waits for the GPU. If nothing is saved, the last update ends the process.
    """

    def __init__(self) -> None:
        self.kind = kind_of(os.environ["MODEL"], tiny=os.environ["TINY"] == "1")
        self.compiled = os.environ["COMPILED"] == "1"
        self.device = torch.device(os.environ["DEVICE"])
        self.steps = int(os.environ["STEPS"])
        self.block = int(os.environ["BLOCK"])
        self.num_samples = 8 * self.kind.batch_size
        self.done = 0
        self.first_step_s = 0.0
        self.step_s: list[float] = []
        self.saves_s: list[float] = []
        self.held_bytes = 0
        # the first block, or the first half of a single one, warms up
        firsts = range(self.block, self.steps, self.block)
        self._begins = {first + 1 for first in firsts} if self.saves else {self.steps // 2}
        self._ends = {first + self.block for first in firsts} if self.saves else {self.steps}
        self._began_s, self._began_at = 0.0, 0
        register_optimizer_step_post_hook(self._tick)

    @property
    def saves(self) -> bool:
        """Whether anything is saved."""
        return self.block < self.steps

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        with self.device:  # a CPU draws the weights of a large model for half a minute
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

    def _tick(self, *_: object) -> None:
        self.done += 1
        begins, ends = self.done in self._begins, self.done in self._ends
        if not begins and not ends and self.done != 1:
            return
        self.synchronize()
        if self.done == 1:
            self.first_step_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s()
        if ends:
            self.step_s.append((time.perf_counter() - self._began_s) / (self.done - self._began_at))
            if self.device.type == "cuda":
                # weights, gradients and the optimizer's state: the activations are freed by now
                self.held_bytes = torch.cuda.memory_allocated()
        if not self.saves and self.done == self.steps:
            self.report()
            os._exit(0)  # before a save at the end, of perhaps 19 GB
        if begins:
            self._began_s, self._began_at = time.perf_counter(), self.done

    def report(self) -> None:
        """Write the readings."""
        on_gpu = self.device.type == "cuda"
        name = torch.cuda.get_device_name() if on_gpu else "CPU"
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        step_s, flops, peak = statistics.median(self.step_s), self.flops_per_step(), peak_flops(name, "bf16")
        units = self.kind.batch_size * (self.kind.sample[0] if len(self.kind.sample) == 1 else 1)
        with torch.device("meta"):
            num_parameters = sum(parameter.numel() for parameter in self.kind.model().parameters())
        record = {
            "device": name,
            "step_ms": step_s * 1e3,
            "per_s": units / step_s,
            "flops": flops,
            "mfu": None if peak is None else flops / step_s / peak,
            "first_step_s": self.first_step_s,
            "peak_gb": (torch.cuda.max_memory_allocated() if on_gpu else resident) / 1e9,
            "bytes_per_parameter": self.held_bytes / num_parameters,
            "first_save_s": self.saves_s[0] if self.saves_s else None,
            "save_s": statistics.median(self.saves_s[1:]) if self.saves_s[1:] else None,
        }
        Path(os.environ["REPORT"]).write_text(json.dumps(record))

    def flops_per_step(self) -> float:
        """FLOPs of a forward and backward pass over a batch, as `torch.utils.flop_counter` counts them."""
        with torch.device("meta"), FlopCounterMode(display=False) as count:
            model = self.kind.model()
            if len(self.kind.sample) == 1:
                features = labels = torch.zeros(2, *self.kind.sample, dtype=torch.int64)
            else:
                features, labels = torch.zeros(2, *self.kind.sample), torch.zeros(2, dtype=torch.int64)
            cross_entropy(model(features).flatten(0, -2), labels.flatten()).backward()
        return count.get_total_flops() / 2 * self.kind.batch_size

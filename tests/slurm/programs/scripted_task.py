"""A task in a module of the user's own: a test scripts how long its steps take, and how ranks fail."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its usual name
from torch.utils.data import Dataset

from hpctrain.data import TensorBatches
from hpctrain.tasks import Sums, Task

FEATURES, CLASSES = 6, 3
WRITER = "checkpoint"
"""The thread that writes one."""


class ScriptedTask(Task):
    """Classifies with a small network that has dropout.

    Args:
        pace: a file with the seconds that a step takes; it may change at any time, and a step that has begun can
            become shorter. 0 where there is none.
        act: `ATTEMPT:RANK:CALL:ACTION`, several joined by commas: in that attempt (`*`: in each) that rank's n-th loss,
            counted from 1, begins with `raise`, `memory`, `polite`, `linger`, `child` or a signal to itself. A polite
            rank ends with code 0 when it gets a SIGTERM; one that lingers never leaves the process group; with `child`
            it waits for a child process that must succeed; one that stops itself waits for a save in progress first,
            and continues at a SIGCONT.
        ballast_mb: a buffer of so many megabytes, so that a save takes time.
        eval_samples: held out; 0 for no evaluation.
        dropout: probability.
    """

    def __init__(
        self, pace: str = "", act: str = "", ballast_mb: int = 0, eval_samples: int = 0, dropout: float = 0.2
    ) -> None:
        self.pace, self.ballast_mb, self.eval_samples, self.dropout = Path(pace), ballast_mb, eval_samples, dropout
        attempt = os.environ.get("HPCTRAIN_CLAIM", "")
        rank = os.environ.get("SLURM_PROCID", os.environ.get("RANK", "0"))
        acts = [one.split(":") for one in act.split(",") if one]
        self.acts = {int(call): action for a, r, call, action in acts if a in {attempt, "*"} and r == rank}
        self.calls = 0

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(self.dropout), nn.Linear(16, CLASSES))
        model.register_buffer("ballast", torch.zeros(self.ballast_mb << 18))
        return model

    def tensor_parallel_plan(self) -> dict[str, Any]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel  # takes half a second

        # the blocks are the divided layers themselves, and nothing changes in place what they return
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        return {"0": ColwiseParallel(), "3": RowwiseParallel()}

    def train_dataset(self) -> Dataset[tuple[Tensor, ...]]:
        return _table(64, seed=1)

    def eval_dataset(self) -> Dataset[tuple[Tensor, ...]] | None:
        return _table(self.eval_samples, seed=2) if self.eval_samples else None

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        if self.calls in self.acts:
            _act(self.acts[self.calls])
        self._take_time()
        features, labels = batch
        return F.cross_entropy(model(features), labels)

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        self._take_time()
        features, labels = batch
        return {"loss": (F.cross_entropy(model(features), labels, reduction="sum"), len(labels))}

    def _take_time(self) -> None:
        now = time.monotonic()
        end = now + self._pace_s()
        while now < end:
            time.sleep(min(0.1, end - now))
            began, now = now, time.monotonic()
            end = min(end, began + self._pace_s())

    def _pace_s(self) -> float:
        try:
            return float(self.pace.read_text())
        except (OSError, ValueError):
            return 0.0


def _table(num_samples: int, seed: int) -> TensorBatches:
    draws = torch.Generator().manual_seed(seed)
    features = torch.randn(num_samples, FEATURES, generator=draws)
    return TensorBatches(features, features[:, :CLASSES].argmax(1))


def _wait_for_the_writer() -> None:
    """A rank that stops itself also stops the thread that writes its checkpoint."""
    deadline = time.monotonic() + 60
    while any(thread.name == WRITER for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _act(action: str) -> None:
    if action == "raise":
        raise ValueError("printed to fail")
    if action == "memory":
        hoard = []
        while True:
            hoard.append(bytearray(os.urandom(1 << 20) * 16))
    if action == "child":
        subprocess.run(["sleep", "300"], check=True)
    if action == "polite":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        return
    if action == "linger":
        torch.distributed.destroy_process_group = lambda *_: time.sleep(600)
        return
    number = getattr(signal, action)
    if number == signal.SIGSTOP:
        _wait_for_the_writer()
    os.kill(os.getpid(), number)
    if number != signal.SIGSTOP:
        time.sleep(60)

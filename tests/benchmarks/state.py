"""What the benchmarks of checkpoints save and load, a model with AdamW, and how they measure it."""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from hpctrain.checkpoint.rng import rng_state
from hpctrain.checkpoint.saver import CheckpointSaver
from hpctrain.checkpoint.state import Head, LiveState
from hpctrain.checkpoint.write import CheckpointWriter
from hpctrain.config.checkpoint import Checkpoint
from hpctrain.rank.stop_request import StopRequest
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Claim, Ledger

WIDTH = 1024
Case = tuple[str, Callable[[], object]]


class State:
    """A model of linear layers and its AdamW, as they are after a step.

    Args:
        millions: of parameters.
        folder: for a run directory, on the file system to measure.
    """

    def __init__(self, millions: int, folder: Path) -> None:
        layers = max(1, round(millions * 1e6 / WIDTH**2))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.step(batch=1)
        self.directory = RunDirectory.at(folder / "run")
        self.directory.create(0o750)
        ledger = Ledger(self.directory)
        self.claim = Claim(ledger, ledger.last_claim())
        self.writer = CheckpointWriter(self.directory, self.claim)
        self.raw = folder / "raw"

    def saver(self) -> CheckpointSaver:
        """A saver whose buffers aren't there yet."""
        return CheckpointSaver(self.directory, self.claim, Checkpoint(), StopRequest(), free_bytes=lambda: None)

    @property
    def live(self) -> list[Tensor]:
        """All tensors that are saved."""
        return list(tensors([self.model.state_dict(), self.optimizer.state_dict()]))

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.live)

    @property
    def checkpoint(self) -> Path:
        return self.directory.checkpoint(1)

    def step(self, batch: int = 8) -> None:
        self.model(torch.ones(batch, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def optimizer_step(self) -> None:
        """Step with the current optimizer, which a benchmark may have replaced."""
        self.optimizer.step()

    @property
    def between_steps(self) -> LiveState:
        head = Head(step=1, samples_seen=1, world_size=1, config_digest="c")
        return LiveState(self.model, {"": self.optimizer}, head=head, rng=[rng_state()])

    def write_raw(self, pieces: Iterable[Tensor]) -> None:
        """Write and fsync, through the page cache."""
        descriptor = os.open(self.raw, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for tensor in pieces:
            data = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
            while len(data):
                data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
        os.close(descriptor)

    def write_past_the_page_cache(self) -> None:
        """Write and fsync as many bytes, 4 MiB at a time, past the page cache."""
        block = mmap.mmap(-1, 4 << 20)
        descriptor = os.open(self.raw, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
        for _ in range(self.bytes // len(block)):
            os.write(descriptor, block)
        os.fsync(descriptor)
        os.close(descriptor)

    def clear(self) -> None:
        """Delete what was written."""
        self.raw.unlink(missing_ok=True)
        shutil.rmtree(self.checkpoint, ignore_errors=True)


def tensors(tree: object) -> Iterable[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    for item in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ():
        yield from tensors(item)


def options(description: str | None, rounds: int, **flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=100, help="parameters")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--folder", type=Path, default=None, help="on the file system to measure")
    for name, text in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    found = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {found.millions}M parameters", flush=True)
    return found


def measure(
    rounds: int,
    before: Callable[[], object],
    cases: list[Case],
    settle: Callable[[], object] = lambda: None,
) -> None:
    """Print each case's time, and its ratio to the first one's.

    Cases take turns, each round beginning with another one, so that none has the quiet machine for itself.

    Args:
        rounds: after one to warm up.
        before: before each case, not timed.
        cases: name and work.
        settle: after each case, not timed.
    """
    times: dict[str, list[float]] = {name: [] for name, _ in cases}
    for number in range(rounds + 1):
        for name, case in cases[number % len(cases) :] + cases[: number % len(cases)]:
            before()
            start = time.perf_counter()
            case()
            end = time.perf_counter()
            settle()
            if number:
                times[name].append(end - start)
    yardstick = cases[0][0]
    for name, _ in cases:
        print(f"  {name:46s}{span(times[name])}  x {ratio(times[name], times[yardstick]):.2f}", flush=True)


def span(times: list[float]) -> str:
    return f"{statistics.median(times):7.3f} s [{min(times):.3f}..{max(times):.3f}]"


def ratio(times: list[float], yardstick: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, yardstick, strict=True))

"""What a save in the background costs training on a GPU, beside a copy of its bytes and beside torch.save.

    python tests/benchmarks/gpu_saves.py [--model gpt2] [--steps 20] [--folder FOLDER] [--json]
    python tests/benchmarks/gpu_saves.py --device cpu --tiny          # tries the program itself, with a toy

With AdamW, a save of gpt2 has 1.5 GB and one of gpt2-medium has 4.3 GB. `copy` is the shortest time to copy as many
bytes into one page-locked block. `stall` is how long training waits in each save, without page-locking. `page-locked
in` is how long the caller waits for page-locking after the first step. `writing` is a step while a checkpoint is being
written. `memory` is the page-locked memory divided by the bytes copied. `torch.save` is timed without fsync.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from hpctrain.checkpoint.rng import rng_state
from hpctrain.checkpoint.saver import CheckpointSaver
from hpctrain.checkpoint.state import Head, LiveState
from hpctrain.config.checkpoint import Checkpoint
from hpctrain.data.micro_batch import iterate_tensors
from hpctrain.rank.stop_request import StopRequest
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Claim, Ledger
from tests.benchmarks.contenders.gpu_workload import GPTS, kind_of

SAVES = 3
GB = 1e9


class SaveTrial:
    """A model with an optimizer, on a device, and its saver."""

    def __init__(self, model: str, options: argparse.Namespace, folder: Path) -> None:
        kind = kind_of(model, tiny=options.tiny)
        self.device = torch.device(options.device)
        self.folder = folder
        with self.device:
            self.model = kind.model()
            self.batch = torch.randint(0, kind.num_classes, (2, *kind.sample))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        directory = RunDirectory.at(folder / "run")
        directory.create(0o750)
        ledger = Ledger(directory)
        self.run = directory
        self.saver = CheckpointSaver(directory, Claim(ledger, ledger.claim()), Checkpoint(), StopRequest())

    def state(self, step: int) -> LiveState:
        head = Head(step=step, samples_seen=step, world_size=1, config_digest="c")
        devices = [self.device] if self.device.type == "cuda" else []
        return LiveState(self.model, {"": self.optimizer}, head=head, rng=[rng_state(devices)])

    def time_step(self) -> float:
        """Train a step, and wait for the GPU."""
        begin = time.perf_counter()
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = cross_entropy(self.model(self.batch).flatten(0, -2), self.batch.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.synchronize()
        return time.perf_counter() - begin

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def time_copy(self, size: int) -> float:
        """The shortest time of a copy of so many bytes into page-locked memory."""
        on_gpu = self.device.type == "cuda"
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        times = []
        for _ in range(4):
            self.synchronize()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            self.synchronize()
            times.append(time.perf_counter() - begin)
        return min(times)

    def time_torch_save(self) -> float:
        begin = time.perf_counter()
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(states, self.folder / "saved.pt")
        taken_s = time.perf_counter() - begin
        (self.folder / "saved.pt").unlink()
        return taken_s


def measure(model: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    trial = SaveTrial(model, options, folder)
    saver = trial.saver
    saver.lock_ahead(trial.state(0))
    trial.time_step()
    begin = time.perf_counter()
    saver._page_locked.wait_until_locked()
    locked_s = time.perf_counter() - begin
    # before anything else takes page-locked memory from torch's allocator, which keeps what it has had
    reserved = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if options.device == "cuda" else 0
    alone = [trial.time_step() for _ in range(options.steps)]
    stalls, writing, written = [], [], []
    for step in range(1, SAVES + 1):
        trial.synchronize()
        begin = time.perf_counter()
        saver.save(trial.state(step), wait=False)
        stalls.append(saver.stall_s)
        while saver.busy and len(writing) < 200:
            writing.append(trial.time_step())
        saver.finish()
        written.append(time.perf_counter() - begin)
        shutil.rmtree(trial.run.checkpoint(step))
    buffers = saver._buffers
    tensors = [tensor for tensor in iterate_tensors((buffers.model, buffers.optimizer)) if tensor.numel() > 1]
    size = sum(tensor.nbytes for tensor in tensors)
    saving = trial.time_torch_save()
    copy_s = trial.time_copy(size)
    return {
        "gb": size / GB,
        "tensors": len(tensors),
        "pinned": sum(tensor.is_pinned() for tensor in tensors) if options.device == "cuda" else 0,
        "copy_s": copy_s,
        "stalls_s": stalls,
        "stall_x": stalls[-1] / copy_s,
        "locked_s": locked_s,
        "written_s": written,
        "torch_save_s": saving,
        "step_ms": statistics.median(alone) * 1e3,
        "step_writing_ms": statistics.median(writing) * 1e3 if writing else None,
        "memory_x": reserved / size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2", choices=list(GPTS))
    parser.add_argument("--steps", type=int, default=20, help="steps without a save")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a toy in place of the model")
    parser.add_argument("--folder", type=Path, help="for saves, on the file system to measure")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure(options.model, options, Path(folder))
    if options.json:
        print(json.dumps(found), flush=True)
        return
    stalls = ", ".join(f"{stall_s:.3f}" for stall_s in found["stalls_s"])
    writing = found["step_writing_ms"]
    print(
        f"{options.model}: {found['gb']:.2f} GB in {found['tensors']} tensors, {found['pinned']} page-locked in "
        f"{found['locked_s']:.1f} s, memory {found['memory_x']:.2f} x; copy {found['copy_s']:.3f} s; stall {stalls} s; "
        f"written in {found['written_s'][-1]:.1f} s; torch.save {found['torch_save_s']:.2f} s; step "
        f"{found['step_ms']:.1f} ms, writing {'-' if writing is None else f'{writing:.1f} ms'}",
        flush=True,
    )


if __name__ == "__main__":
    main()
    os._exit(0)

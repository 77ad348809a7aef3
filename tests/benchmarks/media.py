"""What media cost: time on the training's thread, time in the background, and bytes on disk.

    python tests/benchmarks/media.py [--times 30] [--folder FOLDER]

Each medium is logged as a task logs it, through the task's log, to the files and to TensorBoard. The first time is that
of the call on the training's thread: check, copy, and a place in the queue. The others are those of the thread in the
background, measured by themselves: the CPU time to encode and write a medium, and the wall time, which has the wait for
the disk. While that thread executes Python, the training's thread waits for Python's lock: a loop that does little else
than execute Python also pays a part of the CPU time.

Medians, in milliseconds. Bytes are those of the medium's file, and of its event for TensorBoard. Pictures are of
noise, which PNG can't compress, and of a smooth gradient. The figure needs matplotlib.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctrain.metrics.media import capture
from hpctrain.metrics.media_files import MediaFiles, MediaWriter, Medium, file_name
from hpctrain.metrics.tensorboard import TensorBoardSink
from hpctrain.tasks.position import Position
from hpctrain.train.task_log import AttachedLog

Case = tuple[str, Any, Mapping[str, Any]]
"""The method of the log, what it takes, and its options."""


def cases() -> dict[str, Case]:
    draws = torch.Generator().manual_seed(0)
    ramp = torch.linspace(0, 1, 224).expand(3, 224, 224)
    found: dict[str, Case] = {
        "image 3 x 224 x 224, smooth": ("image", ramp, {}),
        "image 3 x 224 x 224, noise": ("image", torch.rand(3, 224, 224, generator=draws), {}),
        "image 16 x 3 x 64 x 64, noise": ("image", torch.rand(16, 3, 64, 64, generator=draws), {}),
        "image 16 x 3 x 224 x 224, noise": ("image", torch.rand(16, 3, 224, 224, generator=draws), {}),
        "histogram of 10,000 values": ("histogram", torch.randn(10_000, generator=draws), {"bins": 64}),
        "histogram of 1,000,000 values": ("histogram", torch.randn(1_000_000, generator=draws), {"bins": 64}),
        "audio, 1 s at 16 kHz": ("audio", torch.rand(16_000, generator=draws), {"sample_rate": 16_000}),
        "table 100 x 4": ("table", np.arange(400.0).reshape(100, 4).tolist(), {"columns": list("abcd")}),
        "text, 1,000 characters": ("text", "word " * 200, {}),
    }
    if find_spec("matplotlib"):
        found["figure 640 x 480, a curve"] = ("figure", curve(), {})
    return found


def curve() -> Any:
    from matplotlib.figure import Figure

    figure = Figure()
    figure.subplots().plot(np.cumsum(np.random.default_rng(0).normal(size=500)))
    return figure


class Bench:
    """The log, files and event file of a run."""

    def __init__(self, folder: Path, times: int) -> None:
        folder.mkdir()
        self.times, self.folder, self.position = times, folder, Position()
        self.log = AttachedLog("Task", self.position, total_steps=10**9, every_steps=1)
        self.files = MediaFiles(folder / "media", folder / "media.jsonl", 0)
        self.sink = TensorBoardSink(folder / "tensorboard", 0)
        self.writer = MediaWriter(self.files, [self.sink.media])

    def on_training_thread_ms(self, case: Case) -> float:
        """Time of the call, with room in the queue."""
        method, content, options = case
        call, found = getattr(self.log, method), []
        arguments = (options["columns"], content) if method == "table" else (content,)
        keywords = {} if method == "table" else options
        with self.log.training(self.writer):
            for _ in range(self.times):
                self.position.step += 1
                begin = time.perf_counter()
                call("it", *arguments, **keywords)
                self.log.media.release()
                found.append(time.perf_counter() - begin)
                self.writer.flush()
        return 1e3 * statistics.median(found)

    def in_background_ms(self, case: Case) -> tuple[float, float, int, int]:
        """CPU time and wall time; bytes of the file, and of the event."""
        method, content, options = case
        cpu, wall, size = [], [], 0
        before = self.event_bytes()
        for _ in range(self.times):
            self.position.step += 1
            captured = capture("it", method, content, options)
            begin = time.thread_time(), time.perf_counter()
            medium = Medium(self.position.step, time.time(), "train/it", captured.kind, captured.encode())
            self.files.write(medium)
            self.sink.media(medium)
            cpu.append(time.thread_time() - begin[0])
            wall.append(time.perf_counter() - begin[1])
            size = (self.folder / "media" / file_name(medium.name, medium.step, medium.kind)).stat().st_size
        self.sink.flush()
        events = (self.event_bytes() - before) // self.times
        return 1e3 * statistics.median(cpu), 1e3 * statistics.median(wall), size, events

    def event_bytes(self) -> int:
        return sum(file.stat().st_size for file in (self.folder / "tensorboard").glob("*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--folder", type=Path, help="on the file system to measure; a temporary folder by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = "training ms", "background CPU ms", "wall ms", "file bytes", "event bytes"
    print(f"{'':<34}" + "".join(f"{column:>19}" for column in columns))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for number, (name, case) in enumerate(cases().items()):
            bench = Bench(Path(folder) / str(number), options.times)
            training_ms = bench.on_training_thread_ms(case)
            cpu_ms, wall_ms, size, events = bench.in_background_ms(case)
            print(f"{name:<34}{training_ms:>19.3f}{cpu_ms:>19.2f}{wall_ms:>19.2f}{size:>19,}{events:>19,}", flush=True)


if __name__ == "__main__":
    main()

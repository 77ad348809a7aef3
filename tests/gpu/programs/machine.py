"""Measure a GPU and its machine: copies, page-locking, matrix products, and the disk; a line of JSON for each figure.

    python tests/gpu/programs/machine.py cuda|cpu FOLDER [--tiny]

FOLDER is on the disk to measure.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

GB = 1e9
PACKAGES = ("numpy", "hydra-core", "omegaconf", "submitit", "lightning", "accelerate", "transformers", "triton")


def report(name, value, unit, detail=""):
    print(json.dumps({"name": name, "value": value, "unit": unit, "detail": detail}), flush=True)


def best_s(call, rounds=5):
    """The shortest time of some calls, each with the GPU idle before it."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def installed(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def measure_gpu(size):
    free, total = torch.cuda.mem_get_info()
    report("GPU memory", total / GB, "GB", f"{free / GB:.1f} GB free; {torch.cuda.get_device_name()}")
    begin = time.perf_counter()
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    report("cudaHostAlloc", (time.perf_counter() - begin) / (size / GB), "s/GB", f"one block of {size / GB:.2f} GB")
    small = size // 16
    begin = time.perf_counter()
    blocks = [torch.empty(small, dtype=torch.uint8, pin_memory=True) for _ in range(8)]
    report(
        "cudaHostAlloc, blocks",
        (time.perf_counter() - begin) / (len(blocks) * small / GB),
        "s/GB",
        f"8 blocks of {small / 1e6:.0f} MB",
    )
    on_gpu = torch.empty(size, dtype=torch.uint8, device="cuda")
    ordinary = torch.zeros(size // 4, dtype=torch.uint8)
    report("copy to page-locked", size / GB / best_s(lambda: pinned.copy_(on_gpu, non_blocking=True)), "GB/s")
    report("copy from page-locked", size / GB / best_s(lambda: on_gpu.copy_(pinned, non_blocking=True)), "GB/s")
    report("copy to ordinary memory", size / 4 / GB / best_s(lambda: ordinary.copy_(on_gpu[: size // 4])), "GB/s")
    other = torch.empty_like(on_gpu)
    report("copy on the GPU", 2 * size / GB / best_s(lambda: other.copy_(on_gpu)), "GB/s", "read and written")
    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    left @ right
    report("bf16 matrix product", 2 * 8192**3 / 1e12 / best_s(lambda: left @ right, 10), "TFLOP/s", "8192 x 8192")
    scalar = torch.ones(1, device="cuda")
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        scalar.item()
        times.append(time.perf_counter() - begin)
    report("read of a scalar", statistics.median(times) * 1e6, "us")


def measure_disk(folder, size):
    data = os.urandom(1 << 20) * (size >> 20)
    target = folder / "written"
    begin = time.perf_counter()
    with target.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    report("disk, written", size / GB / (time.perf_counter() - begin), "GB/s", "with fsync")
    begin = time.perf_counter()
    target.read_bytes()
    report("disk, read", size / GB / (time.perf_counter() - begin), "GB/s", "from the page cache")
    target.unlink()


def main():
    device, folder, tiny = sys.argv[1], Path(sys.argv[2]), "--tiny" in sys.argv
    report("Python", None, "", platform.python_version())
    report("torch", None, "", f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    report("packages", None, "", ", ".join(f"{name} {installed(name)}" for name in PACKAGES))
    report("cores", len(os.sched_getaffinity(0)), "")
    if device == "cuda":
        report("NCCL", None, "", ".".join(map(str, torch.cuda.nccl.version())))
        measure_gpu((1 << 26) if tiny else (1 << 30))
    measure_disk(folder, (1 << 26) if tiny else (1 << 30))


if __name__ == "__main__":
    main()

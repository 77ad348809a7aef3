"""How fast a rank's device multiplies matrices."""

from __future__ import annotations

import time

import torch

TRIED_S = 0.4
"""Seconds for which multiplications are repeated; the best one counts, since others may share the cores."""


def flops_per_s(device: torch.device) -> float:
    """The best rate of a few matrix multiplications, in floating-point operations per second.

    Small ones on a CPU, so that some of them aren't interrupted by another process; bfloat16 on a GPU.
    """
    size, dtype = (256, torch.float32) if device.type == "cpu" else (4096, torch.bfloat16)
    left = torch.ones(size, size, dtype=dtype, device=device)
    result = torch.empty_like(left)
    torch.mm(left, left, out=result)  # the first one loads libraries
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    best, end = float("inf"), time.perf_counter() + TRIED_S
    while time.perf_counter() < end:
        begin = time.perf_counter()
        torch.mm(left, left, out=result)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best

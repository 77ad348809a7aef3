"""The GPUs of a node, as nvidia-smi and torch report them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

import torch

QUERIED = {
    "index": "index",
    "name": "name",
    "driver": "driver_version",
    "ecc_errors": "ecc.errors.uncorrected.volatile.total",
    "temperature": "temperature.gpu",
    "hardware_slowdown": "clocks_throttle_reasons.hw_slowdown",
    "thermal_slowdown": "clocks_throttle_reasons.hw_thermal_slowdown",
    "power_brake": "clocks_throttle_reasons.hw_power_brake_slowdown",
}
"""Names in a record, and nvidia-smi's for them (`nvidia-smi --help-query-gpu`)."""
SMI_S = 20.0
"""Seconds for nvidia-smi, which waits for a driver that no longer answers."""


def parse_smi(answer: str) -> list[dict[str, str]]:
    """Parse the output of `nvidia-smi --query-gpu=... --format=csv,noheader`: a record per GPU."""
    rows = ([cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.strip())
    return [dict(zip(QUERIED, row, strict=True)) for row in rows if len(row) == len(QUERIED)]


def smi_report() -> dict[str, Any]:
    """What nvidia-smi reports of this node: `gpus`, or `smi_problem` if it fails; empty where it isn't installed."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERIED.values())}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=False)
    except FileNotFoundError:
        return {}
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"smi_problem": str(error)}
    if done.returncode:
        return {"smi_problem": " ".join((done.stdout + done.stderr).split())[:400]}
    return {"gpus": parse_smi(done.stdout)}


def without_peer_access(devices: Sequence[torch.device]) -> list[list[int]]:
    """Pairs of this process's visible GPUs of which one can't reach the other's memory directly.

    Args:
        devices: of this rank; none are compared if it has no GPU.
    """
    if not devices or devices[0].type != "cuda":
        return []
    count = torch.cuda.device_count()
    return [
        [first, second]
        for first in range(count)
        for second in range(first + 1, count)
        if not torch.cuda.can_device_access_peer(first, second)
    ]

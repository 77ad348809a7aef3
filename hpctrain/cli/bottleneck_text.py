"""What holds a run back, as text for people."""

from __future__ import annotations

from hpctrain.run.bottleneck import Verdict

OF_THE_MACHINE = (
    "memory/peak_gb",
    "throughput/mfu",
    "throughput/samples_per_s_per_device",
    "throughput/waiting_for_data",
)
"""Metrics that these lines tell in another way."""


def verdict_lines(verdict: Verdict) -> list[str]:
    """Where the time of the newest attempt's training went, how fast it was, and what to change."""
    lines = []
    if verdict.shares:
        shares = "  ".join(f"{part.replace('_', ' ')} {share:.0%}" for part, share in verdict.shares.items())
        lines.append(f"training    {shares}")
    if figures := _figures(verdict):
        lines.append(f"speed       {figures}")
    if verdict.slowest_rank is not None and verdict.slowest_ratio is not None:
        own = f"{verdict.slowest_ratio:.2f} times the others' own time of a step"
        lines.append(f"slowest     rank {verdict.slowest_rank} on {verdict.slowest_host}: {own}")
    lines.append(f"verdict     {verdict.text}")
    return lines + [f"also        {text}" for text in verdict.also]


def _figures(verdict: Verdict) -> str:
    found = []
    if verdict.samples_per_s_per_device is not None:
        found.append(f"{verdict.samples_per_s_per_device:.4g} samples/s per device")
    if verdict.mfu is not None:
        found.append(f"MFU {verdict.mfu:.1%}")
    if verdict.memory_peak_bytes:
        found.append(f"memory peak {verdict.memory_peak_bytes / 1e9:.2f} GB")
    return "  ".join(found)

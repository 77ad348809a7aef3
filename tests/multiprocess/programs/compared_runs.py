"""What tests compare of runs."""

from __future__ import annotations

import json

from hpctrain.checkpoint.read import load


def losses(run):
    return [entry["train/loss"] for entry in run.metrics if "train/loss" in entry]


def weights(run, step):
    """All saved weights and averages, whole."""
    found = load(run.directory.checkpoint(step))
    tensors = {name: getattr(value, "read", lambda value=value: value)() for name, value in found.model.items()}
    averages = {name: getattr(value, "read", lambda value=value: value)() for name, value in found.extra["ema"].items()}
    return tensors, averages


def taken(run):
    """The samples of each step, over all ranks."""
    steps = {}
    for path in run.directory.logs.glob("samples_*.jsonl"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            steps.setdefault(entry["step"], []).extend(entry["samples"])
    return {step: sorted(samples) for step, samples in sorted(steps.items())}

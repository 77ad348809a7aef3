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
    """The samples of each step, over all ranks; the last line of a step counts."""
    steps = {}
    for path in run.directory.logs.glob("samples_*.jsonl"):
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        for step, samples in {entry["step"]: entry["samples"] for entry in entries}.items():
            steps.setdefault(step, []).extend(samples)
    return {step: sorted(samples) for step, samples in sorted(steps.items())}

"""The first step at which two runs that should be equal differ."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hpctrain.errors import CheckpointDamagedError
from hpctrain.run.checkpoint_manifest import read_manifest
from hpctrain.run.directory import RunDirectory
from hpctrain.status.metrics import read_metrics

OF_THE_MACHINE = ("throughput/*", "memory/*", "*_per_second", "*_runtime")
"""Patterns of metrics that differ from run to run."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference of two runs in their metrics and in their checkpoints.

    Attributes:
        step: the first step that both logged, and at which a metric differs; None without one.
        metrics: at that step, both values by name, exactly.
        checkpoint: the first step whose checkpoints have different weights; None without one.
        equal_checkpoint: the last step before it whose checkpoints have the same weights; None without one.
        num_metrics: metrics that both logged at the same steps.
        num_steps: those steps.
        num_checkpoints: steps of which both have a checkpoint with a digest.
    """

    step: int | None
    metrics: Mapping[str, tuple[float, float]]
    checkpoint: int | None
    equal_checkpoint: int | None
    num_metrics: int = 0
    num_steps: int = 0
    num_checkpoints: int = 0

    @property
    def exists(self) -> bool:
        """Whether anything differs."""
        return self.step is not None or self.checkpoint is not None


def find_divergence(one: RunDirectory, other: RunDirectory) -> Divergence:
    """Compare the metrics that both runs logged at the same steps, and the digests of their checkpoints' weights."""
    mine, theirs = _by_step(one), _by_step(other)
    step, metrics = None, {}
    compared: dict[int, set[str]] = {}
    for common in sorted(mine.keys() & theirs.keys()):
        names = sorted(mine[common].keys() & theirs[common].keys())
        if names:
            compared[common] = set(names)
        pairs = {name: (mine[common][name], theirs[common][name]) for name in names}
        # as text, which is exact, because NaN isn't equal to itself
        metrics = {name: pair for name, pair in pairs.items() if repr(pair[0]) != repr(pair[1])}
        if metrics:
            step = common
            break
    equal = differing = None
    num_checkpoints = 0
    for saved in sorted(set(one.checkpoint_steps()) & set(other.checkpoint_steps())):
        digests = {_digest(run, saved) for run in (one, other)}
        if None in digests:
            continue
        num_checkpoints += 1
        if len(digests) > 1:
            differing = saved
            break
        equal = saved
    num_metrics = len(set().union(*compared.values()))
    return Divergence(step, metrics, differing, equal, num_metrics, len(compared), num_checkpoints)


def _by_step(directory: RunDirectory) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    with contextlib.suppress(OSError):
        for record in read_metrics(directory.metrics):
            kept = (name for name in record.values if not any(fnmatchcase(name, known) for known in OF_THE_MACHINE))
            found.setdefault(record.step, {}).update({name: float(record.values[name]) for name in kept})
    return found


def _digest(directory: RunDirectory, step: int) -> str | None:
    with contextlib.suppress(CheckpointDamagedError):
        return str(read_manifest(directory.checkpoint(step))["weights_digest"]) or None
    return None

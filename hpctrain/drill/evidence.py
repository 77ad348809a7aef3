"""What a run leaves that must not depend on interruptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.files import read_json_lines
from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.run.directory import RunDirectory

UNLIKE = ("time", "nonfinite", "step")
"""Names in metrics.jsonl that are no values of the training."""
SPEED = ("throughput/", "memory/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The traces of one run.

    Attributes:
        step: of the newest intact checkpoint; None where there is none.
        samples_seen: of the same.
        weights_digest: of the same.
        metrics: name -> step -> value, NaN and infinities by name; without speeds.
        samples: step -> rank -> the samples that it took; empty where they weren't recorded.
    """

    step: int | None
    samples_seen: int | None
    weights_digest: str | None
    metrics: Mapping[str, Mapping[int, float | str]]
    samples: Mapping[int, Mapping[int, tuple[int, ...]]]


def read_evidence(directory: RunDirectory) -> Evidence:
    """Read a run's checkpoints, metrics and sample logs; every byte of the checkpoints is verified."""
    newest = next((info for info in reversed(list_checkpoints(directory)) if info.intact), None)
    return Evidence(
        step=None if newest is None else newest.step,
        samples_seen=None if newest is None else newest.samples_seen,
        weights_digest=None if newest is None else newest.weights_digest,
        metrics=_metrics(directory),
        samples=_samples(directory),
    )


def _metrics(directory: RunDirectory) -> dict[str, dict[int, float | str]]:
    found: dict[str, dict[int, float | str]] = {}
    for record in read_json_lines(directory.metrics):
        values = {**record, **record.get("nonfinite", {})}
        for name, value in values.items():
            if name not in UNLIKE and not name.startswith(SPEED):
                found.setdefault(name, {})[int(record["step"])] = value
    return found


def _samples(directory: RunDirectory) -> dict[int, dict[int, tuple[int, ...]]]:
    found: dict[int, dict[int, tuple[int, ...]]] = {}
    for path in sorted(directory.logs.glob(directory.sample_log(0).name.replace("0", "*"))):
        rank = int(path.stem.rpartition("_")[2])
        for record in read_json_lines(path):
            found.setdefault(int(record["step"]), {})[rank] = tuple(record["samples"])
    return found

"""The first measurements of a request, with which later ones are compared."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpctrain.doctor.finding import Finding, Severity
from hpctrain.files import read_json_or_empty, write_json
from hpctrain.phrases import brief_time, scaled
from hpctrain.run.record_fields import POSITIVE, TIME, FieldType, describe_wrong_field

WORSE = {"_s": 3.0, "disk_bandwidth": 3.0}
USUALLY_WORSE = 2.0
"""A figure that is this many times worse than before is reported; times and disks vary more than others."""
SHORT_S = 50e-6
"""Times below this are taken for equal."""
OF_NETWORK = ("pair", "gloo", "nccl")
"""The beginnings of the names of figures of the network."""
LOWER_IS_BETTER = "_s"
"""The end of the names of figures that are seconds."""


_FIELD_TYPES = {
    "time": TIME,
    "figures": FieldType(
        "positive numbers by name", lambda value: isinstance(value, dict) and all(map(POSITIVE.accepts, value.values()))
    ),
}


def request_name(partition: str, nodes: int, processes_per_node: int, gpus_per_node: int) -> str:
    """Under which name a request's figures are stored: they depend on all of these."""
    return f"{partition or 'default'}, {nodes} nodes, {processes_per_node} ranks and {gpus_per_node} GPUs per node"


def compare_with_baseline(
    path: Path, request: str, now: Mapping[str, float], *, renew: bool, explained: bool = False
) -> list[Finding]:
    """Compare figures with the stored ones, or store them if there are none.

    Args:
        path: of the baseline.
        request: as `request_name` returns it.
        now: the new figures.
        renew: replace the stored ones.
        explained: whether a finding on the network explains why that is slow already.
    """
    stored: dict[str, Any] = read_json_or_empty(path)
    before = stored.get(request)
    if not isinstance(before, dict) or describe_wrong_field(before, _FIELD_TYPES, tuple(_FIELD_TYPES)) or renew:
        try:
            write_json(path, {**stored, request: {"time": time.time(), "figures": dict(now)}})
        except OSError as error:
            return [_not_written(path, error)]
        return []
    compared = {name: value for name, value in now.items() if not (explained and name.startswith(OF_NETWORK))}
    return list(_worse(before, compared, path))


def _not_written(path: Path, error: OSError) -> Finding:
    return Finding(
        check="baseline",
        severity=Severity.WARNING,
        problem=f"{path} can't be written: {error.strerror}",
        why="later examinations compare their figures with those in it",
        remedy=f"make room or correct the permissions; if {path} isn't a file, move it away",
    )


def _worse(before: Mapping[str, Any], now: Mapping[str, float], path: Path) -> Iterator[Finding]:
    day = time.strftime("%Y-%m-%d", time.localtime(before["time"]))
    for name, value in now.items():
        earlier = before["figures"].get(name)
        if not earlier or not value:
            continue
        lower = name.endswith(LOWER_IS_BETTER)
        ratio = max(value, SHORT_S) / max(earlier, SHORT_S) if lower else earlier / value
        if ratio < next((factor for ending, factor in WORSE.items() if name.endswith(ending)), USUALLY_WORSE):
            continue
        shown = [
            brief_time(one) if lower else f"{scaled(one, 'FLOP' if 'flops' in name else 'B')}/s"
            for one in (value, earlier)
        ]
        yield Finding(
            check="baseline",
            severity=Severity.WARNING,
            problem=f"{name.removesuffix(LOWER_IS_BETTER).replace('_', ' ')}: {shown[0]}, was {shown[1]} on {day}",
            why="something on the cluster has become slower, or other jobs take part of it now",
            remedy="examine again later; if it stays so, ask the administrators, or accept it with --new-baseline "
            f"(the earlier figures are in {path})",
        )

"""What holds a run back: where the time of its training goes, and one verdict; beside the attempt's exit records."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hpctrain.errors import RunDirectoryError
from hpctrain.files import read_json, write_json
from hpctrain.run.directory import RunDirectory

FILE_NAME = "verdict.json"
PARTS = ("data", "forward", "backward", "gradient_sync", "optimizer", "between_steps", "evaluation", "saving")
"""Where the time after an attempt's first step goes; together all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found up to a step of one attempt.

    Attributes:
        text: one line in plain words: what takes the time, and the key to change.
        also: further findings, one line each.
        step: completed steps.
        steps_timed: those whose parts were timed, on rank zero.
        shares: of the time since the attempt's first step, by `PARTS`; the mean over the ranks.
        slowest_rank: the rank with the most time of its own before the gradient sync; None in a world of one.
        slowest_host: its machine.
        slowest_ratio: its own time over the median of the others'.
        samples_per_s_per_device: over the attempt, without evaluation and saving; None before there is any.
        flops_per_sample: forward and backward; None where it wasn't counted.
        mfu: model FLOPs utilisation, achieved over peak FLOP/s (Chowdhery et al., PaLM, 2022, appendix B); None where
            either isn't known.
        memory_peak_bytes: the most that any rank used.
    """

    text: str
    also: tuple[str, ...] = ()
    step: int = 0
    steps_timed: int = 0
    shares: Mapping[str, float] = field(default_factory=dict)
    slowest_rank: int | None = None
    slowest_host: str | None = None
    slowest_ratio: float | None = None
    samples_per_s_per_device: float | None = None
    flops_per_sample: float | None = None
    mfu: float | None = None
    memory_peak_bytes: int | None = None

    def write(self, claim: Path) -> None:
        """Leave it in the attempt's claim; a file system that refuses is no reason to stop."""
        with contextlib.suppress(OSError):
            write_json(claim / FILE_NAME, asdict(self), durable=False)


def read_verdict(claim: Path) -> Verdict | None:
    """The verdict of an attempt; None where there is none, or none that can be read."""
    try:
        record = read_json(claim / FILE_NAME)
    except (OSError, RunDirectoryError):
        return None
    if not isinstance(record.get("text"), str):
        return None
    known = {name.name for name in fields(Verdict)}
    kept: dict[str, Any] = {name: value for name, value in record.items() if name in known}
    shares, also = kept.get("shares"), kept.get("also")
    kept["shares"] = {name: value for name, value in (shares if isinstance(shares, dict) else {}).items() if _is(value)}
    kept["also"] = tuple(line for line in (also if isinstance(also, list) else ()) if isinstance(line, str))
    return Verdict(**kept)


def last_verdict(directory: RunDirectory) -> Verdict | None:
    """The verdict of the newest attempt that left one."""
    try:
        names = sorted((entry.name for entry in directory.claims.iterdir() if entry.name.isdecimal()), key=int)
    except OSError:
        return None
    found = (read_verdict(directory.claims / name) for name in reversed(names))
    return next((verdict for verdict in found if verdict is not None), None)


def _is(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)

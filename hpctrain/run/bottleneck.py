"""The bottleneck of a run: one finding per attempt, kept with the attempt's exit records."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from hpctrain.files import read_json_or_empty, write_json
from hpctrain.run.record_fields import COUNT, NUMBER, NUMBERS_BY_NAME, TEXT, TEXTS, decode

FILE_NAME = "verdict.json"  # part of the run directory's format, and older than the name of the class
STEP_PARTS = ("data", "forward", "backward", "gradient_sync", "optimizer")
"""Parts of a step, in their order."""
PARTS = (*STEP_PARTS, "between_steps", "evaluation", "saving")
"""Categories of the time after an attempt's first step; together they cover all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The bottleneck of an attempt, as measured up to a step. The fields are those of `verdict.json`.

    Attributes:
        text: one line: the cause, and the key to change.
        also: further findings, one line each.
        step: completed steps.
        steps_timed: number of steps that rank zero timed part by part.
        shares: of the time since the attempt's first step, by `PARTS`; the mean over the ranks.
        slowest_rank: the rank that computes longest before the gradient sync; None in a world of one.
        slowest_host: its machine.
        slowest_ratio: its time before the gradient sync over the median of the others'.
        samples_per_s_per_device: over the attempt, without evaluation and saving; None before there is any.
        flops_per_sample: forward and backward; None if they weren't counted.
        mfu: model FLOPs utilisation, achieved over peak FLOP/s (Chowdhery et al., PaLM, 2022, appendix B); None if
            either isn't known.
        memory_peak_bytes: the largest peak of any rank.
    """

    text: Annotated[str, TEXT]
    also: Annotated[tuple[str, ...], TEXTS] = ()
    step: Annotated[int, COUNT] = 0
    steps_timed: Annotated[int, COUNT] = 0
    shares: Annotated[Mapping[str, float], NUMBERS_BY_NAME] = field(default_factory=dict)
    slowest_rank: Annotated[int | None, COUNT] = None
    slowest_host: Annotated[str | None, TEXT] = None
    slowest_ratio: Annotated[float | None, NUMBER] = None
    samples_per_s_per_device: Annotated[float | None, NUMBER] = None
    flops_per_sample: Annotated[float | None, NUMBER] = None
    mfu: Annotated[float | None, NUMBER] = None
    memory_peak_bytes: Annotated[int | None, NUMBER] = None

    @property
    def figures(self) -> list[str]:
        """Speed and memory in words, as far as they are known."""
        figures = []
        if self.samples_per_s_per_device is not None:
            figures.append(f"{self.samples_per_s_per_device:.4g} samples/s per device")
        if self.mfu is not None:
            figures.append(f"MFU {self.mfu:.1%}")
        if self.memory_peak_bytes:
            figures.append(f"memory peak {self.memory_peak_bytes / 1e9:.2f} GB")
        return figures

    def write(self, claim: Path) -> None:
        """Write it into the attempt's claim; an error of the file system is ignored."""
        # training doesn't depend on it, and the next write comes in seconds
        with contextlib.suppress(OSError):
            write_json(claim / FILE_NAME, asdict(self), durable=False)


def read_bottleneck(claim: Path) -> Bottleneck | None:
    """Read the bottleneck of an attempt; None if the file is missing or unreadable."""
    return decode(Bottleneck, read_json_or_empty(claim / FILE_NAME))

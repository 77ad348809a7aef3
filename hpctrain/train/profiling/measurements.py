"""Measurements of an attempt: each rank's mean step, and the seconds spent between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hpctrain.config.root import Config
from hpctrain.rank.world import World
from hpctrain.run.bottleneck import STEP_PARTS

OWN_PARTS = ("data", "forward", "backward")
"""The parts of a step in which a rank doesn't wait for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The mean step of one rank, over the steps that were timed; small, to be gathered at rank zero.

    Attributes:
        rank: in the world.
        host: its machine.
        steps_timed: number of steps in the means.
        steps_loaded: number of steps in the mean of "data" if that is another one; else 0.
        parts: seconds per step, by part (`hpctrain.run.bottleneck.STEP_PARTS`).
        memory_peak_bytes: the peak so far.
        growth_bytes: growth of memory use per step; 0 if it doesn't grow.
        syncs: lines of the task's code that made the host wait for the GPU, and how often per step.
    """

    rank: int
    host: str
    steps_timed: int = 0
    steps_loaded: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)
    memory_peak_bytes: int = 0
    growth_bytes: float = 0.0
    syncs: Mapping[str, float] = field(default_factory=dict)

    @property
    def own_s(self) -> float:
        """Seconds per step before the gradient sync."""
        return sum(self.parts.get(part, 0.0) for part in OWN_PARTS)

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return sum(self.parts.values())

    def share(self, part: str) -> float:
        """Share of a part in the step."""
        return self.parts.get(part, 0.0) / self.step_s if self.step_s > 0 else 0.0

    def since(self, earlier: RankReport) -> RankReport:
        """The mean step between an earlier report of the same rank and this one; without parts if none was timed."""
        parts = {}
        for part, mean in self.parts.items():
            now, before = self._steps_of(part), earlier._steps_of(part)
            if now > before:
                seconds = mean * now - earlier.parts.get(part, 0.0) * before
                parts[part] = max(0.0, seconds) / (now - before)
        return replace(self, steps_timed=self.steps_timed - earlier.steps_timed, steps_loaded=0, parts=parts)

    def _steps_of(self, part: str) -> int:
        return self.steps_loaded if part == "data" and self.steps_loaded else self.steps_timed


class Slowest(NamedTuple):
    """The rank that computes longest before the gradient sync.

    Attributes:
        report: of that rank.
        ratio: its time before the gradient sync over the median of the others'.
    """

    report: RankReport
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Seconds since the attempt's first step, and the ranks' reports.

    Attributes:
        config: of the run.
        world: the ranks.
        reports: one per rank, in rank order.
        step: completed steps.
        steps: steps since the attempt's first one.
        samples: samples of those steps, over all ranks.
        total_steps: the step at which the run ends.
        steps_per_epoch: of the data.
        train_s: seconds in steps and between them.
        eval_s: seconds in evaluations.
        save_s: seconds for which training waited for saves.
        evaluations: number of evaluations.
        saves: number of saves.
        agreement_s: seconds of waiting for the other ranks between steps.
        logging_s: seconds of writing metrics.
        num_workers: loading processes per rank.
        more_workers_help: whether more of them can help; they can't for data that comes in batches or as a stream.
        gradient_bytes: size of the gradients that a rank sends in each step.
        faster_precision: with which the device may compute faster; empty without one.
    """

    config: Config
    world: World
    reports: Sequence[RankReport]
    step: int
    steps: int
    samples: int = 0
    total_steps: int
    steps_per_epoch: int
    train_s: float
    eval_s: float = 0.0
    save_s: float = 0.0
    evaluations: int = 0
    saves: int = 0
    agreement_s: float = 0.0
    logging_s: float = 0.0
    num_workers: int = 0
    more_workers_help: bool = True
    gradient_bytes: int = 0
    faster_precision: str = ""

    @property
    def wall_s(self) -> float:
        """All seconds since the first step."""
        return self.train_s + self.eval_s + self.save_s

    @property
    def samples_per_s_per_device(self) -> float:
        """Throughput without evaluation and saving; 0 before there is any."""
        return self.samples / self.train_s / self.world.num_devices if self.train_s > 0 else 0.0

    @property
    def batch_may_grow(self) -> bool:
        """Whether the data has samples for a larger global batch."""
        return self.steps_per_epoch > 1

    @property
    def timed(self) -> list[RankReport]:
        """Reports of the ranks that timed a step."""
        return [report for report in self.reports if report.steps_timed]

    @property
    def num_hosts(self) -> int:
        """Number of machines with ranks."""
        return len({report.host for report in self.reports})

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the time, by `hpctrain.run.bottleneck.PARTS`, which sum to 1; empty if no step was timed.

        A part of a step is the mean over the timed steps and over the ranks, times the number of steps.
        """
        timed = self.timed
        if self.wall_s <= 0 or not timed:
            return {}
        parts = {
            part: self.steps * sum(report.parts.get(part, 0.0) for report in timed) / len(timed) for part in STEP_PARTS
        }
        in_steps = sum(parts.values())
        # timed steps may have been slower than the others: limit the parts to the measured time of all steps
        shrink = min(1.0, self.train_s / in_steps) if in_steps > 0 else 0.0
        parts = {part: shrink * seconds for part, seconds in parts.items()}
        parts["between_steps"] = max(0.0, self.train_s - sum(parts.values()))
        parts |= {"evaluation": self.eval_s, "saving": self.save_s}
        return {part: seconds / self.wall_s for part, seconds in parts.items()}

    @property
    def slowest(self) -> Slowest | None:
        """The slowest rank; None if fewer than two ranks timed a step."""
        return slowest_of(self.timed)


def slowest_of(timed: Sequence[RankReport]) -> Slowest | None:
    """Return the slowest of the ranks that timed a step; None if they are fewer than two."""
    if len(timed) < 2:
        return None
    slowest = max(timed, key=lambda report: report.own_s)
    usual = median([report.own_s for report in timed if report is not slowest])
    return Slowest(slowest, slowest.own_s / usual) if usual > 0 else None


def median(values: Sequence[float]) -> float:
    """Return the median of at least one value."""
    # not the standard library's: `statistics` imports `decimal` and `fractions`, five milliseconds of each start
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

"""All that is known about where the time of an attempt's training went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.config.root import Config
from hpctrain.train.profiling.report import RankReport

STEP_PARTS = ("data", "forward", "backward", "gradient_sync", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Seconds since the attempt's first step, and the ranks' reports.

    Attributes:
        config: of the run.
        reports: one per rank, in rank order.
        step: completed steps.
        steps: of them, those since the attempt's first one.
        samples: of those, over all ranks.
        total_steps: where the run ends.
        steps_per_epoch: of the data.
        train_s: in steps and between them.
        eval_s: in evaluations.
        save_s: in saves, as long as the training waited.
        evaluations: how many there were.
        saves: how many there were.
        agreement_s: waiting for the other ranks' word between steps.
        logging_s: writing metrics.
        num_workers: loading processes per rank.
        cores: of this rank.
        on_gpu: whether the ranks have GPUs.
    """

    config: Config
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
    cores: int = 1
    on_gpu: bool = False

    @property
    def wall_s(self) -> float:
        """All of it."""
        return self.train_s + self.eval_s + self.save_s

    @property
    def samples_per_s(self) -> float:
        """Over all ranks, without evaluation and saving; 0 before there are any."""
        return self.samples / self.train_s if self.train_s > 0 else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Of the time, by `hpctrain.run.bottleneck.PARTS`, together 1; empty where nothing was timed.

        The parts of a step are those of the timed steps, the mean over the ranks, times the number of steps; more than
        was measured for all steps together they can't be.
        """
        timed = [report for report in self.reports if report.steps_timed]
        if self.wall_s <= 0 or not timed:
            return {}
        parts = {
            part: self.steps * sum(report.parts.get(part, 0.0) for report in timed) / len(timed) for part in STEP_PARTS
        }
        in_steps = sum(parts.values())
        shrink = min(1.0, self.train_s / in_steps) if in_steps > 0 else 0.0
        parts = {part: shrink * seconds for part, seconds in parts.items()}
        parts["between_steps"] = max(0.0, self.train_s - sum(parts.values()))
        parts |= {"evaluation": self.eval_s, "saving": self.save_s}
        return {part: seconds / self.wall_s for part, seconds in parts.items()}

    @property
    def slowest(self) -> tuple[RankReport, float] | None:
        """The rank with the most time of its own, and how many times the median of the others' it is."""
        timed = [report for report in self.reports if report.steps_timed]
        if len(timed) < 2:
            return None
        slowest = max(timed, key=lambda report: report.own_s)
        usual = median([report.own_s for report in timed if report is not slowest])
        return (slowest, slowest.own_s / usual) if usual > 0 else None


def median(values: Sequence[float]) -> float:
    """The middle one of at least one value, or the mean of the two in the middle."""
    # the module `statistics` would be the only one to import `decimal` and `fractions`: five milliseconds of a start
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

"""The bottleneck of an attempt: what was measured, and checks for each possible cause.

Every check names one cause, the time it costs and the key to change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

from hpctrain.config.cluster import Slurm
from hpctrain.config.root import Config
from hpctrain.phrases import counted, scaled
from hpctrain.rank.world import World
from hpctrain.run.bottleneck import STEP_PARTS, Bottleneck

NOTEWORTHY = 0.1
"""Findings that cost a smaller share of the time aren't reported."""
COMPRESSIBLE_BYTES = 2**20
"""Below this size, latency and not bandwidth limits the sending of gradients, so compression doesn't help."""
AIM = 0.05
"""The share of the time that evaluating, saving or logging would take with the proposed number."""
CHANGES_THE_WEIGHTS = "in a new run: it changes the weights"
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


class SlowestRank(NamedTuple):
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
    def slowest(self) -> SlowestRank | None:
        """The slowest rank; None if fewer than two ranks timed a step."""
        return slowest_of(self.timed)


def slowest_of(timed: Sequence[RankReport]) -> SlowestRank | None:
    """Return the slowest of the ranks that timed a step; None if they are fewer than two."""
    if len(timed) < 2:
        return None
    slowest = max(timed, key=lambda report: report.own_s)
    usual = median([report.own_s for report in timed if report is not slowest])
    return SlowestRank(slowest, slowest.own_s / usual) if usual > 0 else None


def median(values: Sequence[float]) -> float:
    """Return the median of at least one value."""
    # not the standard library's: `statistics` imports `decimal` and `fractions`, five milliseconds of each start
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


class PossibleBottleneck(NamedTuple):
    """A possible bottleneck.

    Attributes:
        weight: the share of the time to be gained; above 1 for findings that come first regardless of their share.
        text: the finding, and the key to change.
    """

    weight: float
    text: str


def find_bottleneck(measured: Measurements, *, flops_per_sample: float | None, mfu: float | None) -> Bottleneck:
    """Run all checks; return the finding with the largest weight, and the figures for `verdict.json`."""
    text, *also = _texts_by_weight(measured)
    slowest = measured.slowest
    return Bottleneck(
        text=text,
        also=tuple(also),
        step=measured.step,
        steps_timed=measured.reports[0].steps_timed if measured.reports else 0,
        shares={part: round(share, 4) for part, share in measured.shares.items()},
        slowest_rank=None if slowest is None else slowest.report.rank,
        slowest_host=None if slowest is None else slowest.report.host,
        slowest_ratio=None if slowest is None else slowest.ratio,
        samples_per_s_per_device=measured.samples_per_s_per_device or None,
        flops_per_sample=flops_per_sample,
        mfu=mfu,
        memory_peak_bytes=max((report.memory_peak_bytes for report in measured.reports), default=None),
    )


def _texts_by_weight(measured: Measurements) -> list[str]:
    if not measured.shares:
        return ["too short to find a bottleneck: no step was timed"]
    candidates = [candidate for check in CHECKS if (candidate := check(measured)) is not None]
    noteworthy = [candidate for candidate in candidates if candidate.weight >= NOTEWORTHY]
    noteworthy.sort(key=attrgetter("weight"), reverse=True)
    return [candidate.text for candidate in noteworthy] or [_own_compute(measured)]


def memory(measured: Measurements) -> PossibleBottleneck | None:
    """Memory use grows with each step, which ends the run sooner or later."""
    worst = max(measured.reports, key=lambda report: report.growth_bytes)
    if worst.growth_bytes <= 0:
        return None
    steps_left = max(0, measured.total_steps - measured.step)
    forecast = f", {scaled(worst.growth_bytes * steps_left, 'B')} more by the last one" if steps_left else ""
    where = f" on rank {worst.rank} of {worst.host}" if len(measured.reports) > 1 else ""
    remedy = "something keeps each step's graph, such as a list of losses: keep loss.detach() or loss.item() instead"
    return PossibleBottleneck(
        3.0, f"memory grows by {scaled(worst.growth_bytes, 'B')} with each step{where}{forecast}: {remedy}"
    )


def device_syncs(measured: Measurements) -> PossibleBottleneck | None:
    """Lines of the task make the host wait for the GPU, in at least every other step."""
    places: dict[str, float] = {}
    for report in measured.reports:
        for place, per_step in report.syncs.items():
            places[place] = max(places.get(place, 0.0), per_step)
    often = sorted((place for place, per_step in places.items() if per_step >= 0.5), key=lambda place: -places[place])
    if not often:
        return None
    elsewhere = f" (and {', '.join(often[1:4])})" if len(often) > 1 else ""
    remedy = "an .item(), .cpu(), bool() or print() of a tensor there; leave it on the device, or do it rarely"
    return PossibleBottleneck(2.0, f"the host waits for the GPU in every step at {often[0]}{elsewhere}: {remedy}")


def slow_rank(measured: Measurements) -> PossibleBottleneck | None:
    """One rank has more work or a slower machine, and the others wait for it at each gradient sync."""
    if measured.slowest is None:
        return None
    slowest, ratio = measured.slowest
    peers = [report for report in measured.timed if report is not slowest]
    excess_s = slowest.own_s - median([report.own_s for report in peers])
    weight = excess_s / slowest.step_s * _share_of_steps(measured)
    data_s = slowest.parts.get("data", 0.0) - median([report.parts.get("data", 0.0) for report in peers])
    if data_s > excess_s / 2:
        remedy = "it waits for its data: check the file system that this machine reads from"
    else:
        remedy = "check for other processes on that machine"
        if isinstance(measured.config.cluster, Slurm) and measured.num_hosts > 1:
            remedy += f", or cluster.exclude={slowest.host}"
    text = f"rank {slowest.rank} on {slowest.host} takes {ratio:.1f} times as long as the others for its own part of a"
    return PossibleBottleneck(weight, f"{text} step, and they wait for it {weight:.0%} of the time: {remedy}")


def data(measured: Measurements) -> PossibleBottleneck | None:
    """All ranks wait for their samples."""
    share = measured.shares["data"]
    cheaper = "a cheaper __getitem__" if measured.more_workers_help else "a cheaper way to make a batch"
    # the rank that waits least: `slow_rank` reports a single rank that waits longer
    usual = min(measured.timed, key=lambda report: report.parts.get("data", 0.0))
    weight = usual.share("data") * _share_of_steps(measured)
    data_s, workers, cores = usual.parts.get("data", 0.0), measured.num_workers, measured.world.cores
    rest_s = max(usual.step_s - data_s, 1e-9)
    work_s = data_s if workers == 0 else workers * usual.step_s
    needed = max(workers + 1, math.ceil(1.2 * work_s / rest_s))
    # a single core that computes the model has no time for a loading process
    helps = measured.more_workers_help and (bool(measured.world.gpus) or cores > 1)
    possible = max(workers, min(needed, cores)) if helps else workers
    remedies = [f"data.num_workers {workers} -> {possible}"] if possible > workers else []
    if needed > possible:
        # the cores of this machine are shared out already; a job may request more
        may_request = measured.more_workers_help and isinstance(measured.config.cluster, Slurm)
        request = f"cluster.cpus_per_process {cores} -> {min(needed + 1, 4 * cores)}, or " if may_request else ""
        remedies.append(f"{request}{cheaper}")
    return PossibleBottleneck(weight, f"waiting for data {share:.0%} of the time: {', then '.join(remedies)}")


def gradient_sync(measured: Measurements) -> PossibleBottleneck | None:
    """Even the last rank to arrive waits for the gradients to be sent."""
    if len(measured.reports) < 2:
        return None
    weight = min(report.share("gradient_sync") for report in measured.reports) * _share_of_steps(measured)
    parallel, formats = measured.config.parallel, measured.config.precision.formats
    # half-precision gradients have that size already
    compressible = parallel.gradient_compression == "none" and not formats.has_half_weights
    if measured.gradient_bytes < COMPRESSIBLE_BYTES:
        size, ranks = scaled(measured.gradient_bytes, "B"), counted(measured.world.size, "rank")
        remedy = f"with gradients of {size} the model is small for {ranks}; fewer may be as fast"
    elif compressible:
        kind = "bf16" if measured.world.gpus and parallel.backend != "gloo" else "fp16"
        remedy = f"parallel.gradient_compression none -> {kind}, {CHANGES_THE_WEIGHTS}"
    elif measured.batch_may_grow:
        remedy = f"a larger trainer.global_batch_size has more work per sync, {CHANGES_THE_WEIGHTS}"
    else:
        remedy = f"the model is small for {counted(measured.world.size, 'rank')}; fewer may be as fast"
    remedy += "; check that cluster.network_interface is the fast network" if measured.num_hosts > 1 else ""
    return PossibleBottleneck(weight, f"sending gradients {weight:.0%} of the time: {remedy}")


def optimizer(measured: Measurements) -> PossibleBottleneck | None:
    """The update takes a fifth of the time or more, and the optimizer has a faster implementation."""
    share = measured.shares["optimizer"]
    node = measured.config.optimizer
    # `fused` and `foreach` exclude each other
    slow = isinstance(node, dict) and node.get("fused", True) is None and not node.get("foreach")
    if share < 2 * NOTEWORTHY or not slow:
        return None
    return PossibleBottleneck(share, f"the optimizer takes {share:.0%} of the time: optimizer.fused null -> true")


def evaluation(measured: Measurements) -> PossibleBottleneck | None:
    """Evaluations come too often, or take too long."""
    share = measured.shares["evaluation"]
    if measured.evaluations < 2:
        return None
    every = measured.config.trainer.eval_every_steps or measured.steps_per_epoch
    rarer = _rarer(every, share, measured.total_steps)
    if rarer is None:
        return None
    return PossibleBottleneck(share, f"evaluating {share:.0%} of the time: trainer.eval_every_steps {every} -> {rarer}")


def saving(measured: Measurements) -> PossibleBottleneck | None:
    """Saves come too often, or training waits too long for them."""
    share, policy = measured.shares["saving"], measured.config.checkpoint
    if measured.saves < 2:
        return None
    if not policy.asynchronous:
        remedy = "checkpoint.asynchronous false -> true"
    elif policy.every_steps is not None:
        rarer = _rarer(policy.every_steps, share, measured.total_steps)
        if rarer is None:
            return None
        remedy = f"checkpoint.every_steps {policy.every_steps} -> {rarer}"
    elif policy.auto:
        remedy = "a run_dir on a faster file system"
    else:
        remedy = "checkpoint.auto=true, which weighs what a save costs against what a failure would"
    return PossibleBottleneck(share, f"saving {share:.0%} of the time: {remedy}")


def agreement(measured: Measurements) -> PossibleBottleneck | None:
    """Ranks wait for each other between steps."""
    share = measured.agreement_s / measured.wall_s
    network = "cluster.network_interface is the fast network, and that " if measured.num_hosts > 1 else ""
    remedy = f"check that {network}no rank shares its cores"
    return PossibleBottleneck(share, f"the ranks wait for each other between steps {share:.0%} of the time: {remedy}")


def logging(measured: Measurements) -> PossibleBottleneck | None:
    """Metrics are written too often."""
    share, every = measured.logging_s / measured.wall_s, measured.config.logger.every_steps
    rarer = _rarer(every, share, measured.total_steps)
    if rarer is None:
        return None
    return PossibleBottleneck(share, f"writing metrics {share:.0%} of the time: logger.every_steps {every} -> {rarer}")


def between_steps(measured: Measurements) -> PossibleBottleneck | None:
    """The rest: Python, in runs whose steps are shorter than the work around them."""
    measured_share = (measured.agreement_s + measured.logging_s) / measured.wall_s
    share = measured.shares["between_steps"] - measured_share
    if not measured.batch_may_grow:
        return None
    # not a larger micro-batch, which leaves the number of steps as it is
    remedy = f"steps are short; a larger trainer.global_batch_size has fewer of them, {CHANGES_THE_WEIGHTS}"
    return PossibleBottleneck(share, f"{share:.0%} of the time is spent between the steps: {remedy}")


CHECKS: tuple[Callable[[Measurements], PossibleBottleneck | None], ...] = (
    memory,
    device_syncs,
    slow_rank,
    data,
    gradient_sync,
    optimizer,
    evaluation,
    saving,
    agreement,
    logging,
    between_steps,
)


def _own_compute(measured: Measurements) -> str:
    shares = measured.shares
    share = shares["forward"] + shares["backward"] + shares["optimizer"]
    once = shares["evaluation"] + shares["saving"]
    if once > share:
        return f"too short to find a bottleneck: evaluating and saving once take {once:.0%} of the time"
    text = f"the model's own compute takes {share:.0%} of the time"
    faster = []
    if measured.world.gpus and measured.faster_precision:
        faster.append(f"precision={measured.faster_precision}")
    if measured.world.gpus and not measured.config.trainer.compile:
        faster.append("trainer.compile=true")
    if share > 0.5:
        text = f"nothing holds it back: {text}"
    elif not faster:
        text = f"no key would make it faster: {text}"
    return f"{text}; to make that faster: {', '.join(faster)}" if faster else text


def _share_of_steps(measured: Measurements) -> float:
    """The share of the time that is spent in steps: converts a share of a step into a share of the time."""
    shares = measured.shares
    return max(0.0, 1 - shares["evaluation"] - shares["saving"] - shares["between_steps"])


def _rarer(every: int, share: float, total_steps: int) -> int | None:
    """Return the interval, in steps, that reduces the share to `AIM`, rounded up to two digits.

    None if it already spans the run, and a longer one would change nothing.
    """
    apart = every * share * (1 - AIM) / (AIM * max(1e-3, 1 - share))
    digits = int(10 ** max(0, math.floor(math.log10(max(apart, 1))) - 1))
    longer = min(total_steps, max(every + 1, math.ceil(apart / digits) * digits))
    return longer if longer > every else None

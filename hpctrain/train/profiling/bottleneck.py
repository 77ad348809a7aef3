"""What holds a run back: causes, each with what is to be gained and the key to change, and one verdict."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from hpctrain.config.cluster import Slurm
from hpctrain.run.bottleneck import Verdict
from hpctrain.train.profiling.measurements import Evidence, median

NOTEWORTHY = 0.1
"""Shares of the time below this are the price of training."""
AIM = 0.05
"""What evaluating, saving or logging may take, for the number that is proposed."""
MOST_OF_IT = 0.5


class Cause(NamedTuple):
    """One thing that holds a run back.

    Attributes:
        weight: the share of the time that is to be gained; above 1 for what comes first whatever its share.
        text: what it is, and the key to change.
    """

    weight: float
    text: str


def conclude(
    evidence: Evidence,
    *,
    samples_per_s_per_device: float | None,
    flops_per_sample: float | None,
    mfu: float | None,
) -> Verdict:
    """The verdict with all that it rests on, for the run directory."""
    text, also = judge(evidence)
    slowest, ratio = evidence.slowest or (None, None)
    return Verdict(
        text=text,
        also=also,
        step=evidence.step,
        steps_timed=evidence.reports[0].steps_timed if evidence.reports else 0,
        shares={part: round(share, 4) for part, share in evidence.shares.items()},
        slowest_rank=None if slowest is None else slowest.rank,
        slowest_host=None if slowest is None else slowest.host,
        slowest_ratio=ratio,
        samples_per_s_per_device=samples_per_s_per_device,
        flops_per_sample=flops_per_sample,
        mfu=mfu,
        memory_peak_bytes=max((report.memory_peak_bytes for report in evidence.reports), default=None),
    )


def judge(evidence: Evidence) -> tuple[str, tuple[str, ...]]:
    """The verdict, and what else was found; one line each."""
    if not evidence.shares:
        return "too short to tell: no step was timed", ()
    found = [cause for look in CAUSES if (cause := look(evidence)) is not None and cause.weight >= NOTEWORTHY]
    found.sort(key=lambda cause: -cause.weight)
    if not found:
        return _own_compute(evidence), ()
    return found[0].text, tuple(cause.text for cause in found[1:])


def memory(evidence: Evidence) -> Cause | None:
    """It grows with each step, which ends the run sooner or later."""
    worst = max(evidence.reports, key=lambda report: report.growth_bytes)
    if worst.growth_bytes <= 0:
        return None
    left = max(0, evidence.total_steps - evidence.step)
    more = f", {_size(worst.growth_bytes * left)} more by the last one" if left else ""
    where = f" on rank {worst.rank} of {worst.host}" if len(evidence.reports) > 1 else ""
    remedy = "something keeps each step's graph, such as a list of losses: keep loss.detach() or loss.item() instead"
    return Cause(3.0, f"memory grows by {_size(worst.growth_bytes)} with each step{where}{more}: {remedy}")


def device_syncs(evidence: Evidence) -> Cause | None:
    """Lines of the task that make the host wait for the GPU in every other step or more."""
    places: dict[str, float] = {}
    for report in evidence.reports:
        for place, per_step in report.syncs.items():
            places[place] = max(places.get(place, 0.0), per_step)
    often = sorted((place for place, per_step in places.items() if per_step >= 0.5), key=lambda place: -places[place])
    if not often:
        return None
    more = f" (and {', '.join(often[1:4])})" if len(often) > 1 else ""
    remedy = "an .item(), .cpu(), bool() or print() of a tensor there; leave it on the device, or do it rarely"
    return Cause(2.0, f"the host waits for the GPU in every step at {often[0]}{more}: {remedy}")


def slow_rank(evidence: Evidence) -> Cause | None:
    """One rank has more to do, or a slower machine, and all others wait for it at each gradient sync."""
    found = evidence.slowest
    if found is None:
        return None
    slowest, ratio = found
    others = [report for report in evidence.reports if report is not slowest and report.steps_timed]
    excess_s = slowest.own_s - median([report.own_s for report in others])
    weight = excess_s / slowest.step_s * _in_steps(evidence)
    data_s = slowest.parts.get("data", 0.0) - median([report.parts.get("data", 0.0) for report in others])
    if data_s > MOST_OF_IT * excess_s:
        remedy = "it waits for its data: see the path by which that machine reads them"
    else:
        remedy = "see what else runs on that machine"
        if isinstance(evidence.config.cluster, Slurm) and len({report.host for report in evidence.reports}) > 1:
            remedy += f", or cluster.exclude={slowest.host}"
    text = f"rank {slowest.rank} on {slowest.host} takes {ratio:.1f} times as long as the others for its own part of a"
    return Cause(weight, f"{text} step, and they wait for it {weight:.0%} of the time: {remedy}")


def data(evidence: Evidence) -> Cause | None:
    """Steps wait for their samples on all ranks."""
    share = evidence.shares["data"]
    waits = [report for report in evidence.reports if report.steps_timed]
    # what a single slow rank waits is told of that rank
    usual = min(waits, key=lambda report: report.parts.get("data", 0.0))
    weight = usual.share("data") * _in_steps(evidence)
    data_s, workers, cores = usual.parts.get("data", 0.0), evidence.num_workers, evidence.cores
    rest_s = max(usual.step_s - data_s, 1e-9)
    work_s = data_s if workers == 0 else workers * usual.step_s
    needed = max(workers + 1, math.ceil(1.2 * work_s / rest_s))
    possible = max(workers, min(needed, cores))
    steps = [f"data.num_workers {workers} -> {possible}"] if possible > workers else []
    if needed > cores:
        steps.append(f"cluster.cpus_per_process {cores} -> {min(needed + 1, 4 * cores)}, or a cheaper __getitem__")
    return Cause(weight, f"waiting for data {share:.0%} of the time: {', then '.join(steps)}")


def gradient_sync(evidence: Evidence) -> Cause | None:
    """The time that even the last rank to arrive needs for the gradients' way."""
    if len(evidence.reports) < 2:
        return None
    weight = min(report.share("gradient_sync") for report in evidence.reports) * _in_steps(evidence)
    parallel = evidence.config.parallel
    if parallel.gradient_compression == "none":
        kind = "bf16" if evidence.on_gpu else "fp16"
        remedy = f"parallel.gradient_compression none -> {kind}, in a new run: it changes the weights"
    else:
        remedy = "a larger trainer.global_batch_size with the same trainer.micro_batch_size: more work per sync"
    remedy += "; see that cluster.network_interface is the fast network" if _hosts(evidence) > 1 else ""
    return Cause(weight, f"sending gradients {weight:.0%} of the time: {remedy}")


def optimizer(evidence: Evidence) -> Cause | None:
    """The update takes much of a step, and there is a faster one."""
    share = evidence.shares["optimizer"]
    node = evidence.config.optimizer
    if share < 2 * NOTEWORTHY or not isinstance(node, dict) or node.get("fused", True):
        return None
    return Cause(share, f"the optimizer takes {share:.0%} of the time: optimizer.fused null -> true")


def evaluation(evidence: Evidence) -> Cause | None:
    """Evaluations come too often, or take too long."""
    share = evidence.shares["evaluation"]
    if evidence.evaluations < 2:
        return None
    every = evidence.config.trainer.eval_every_steps or evidence.steps_per_epoch
    return Cause(
        share, f"evaluating {share:.0%} of the time: trainer.eval_every_steps {every} -> {_rarer(every, share)}"
    )


def saving(evidence: Evidence) -> Cause | None:
    """Saves come too often, or hold up the training for too long."""
    share, policy = evidence.shares["saving"], evidence.config.checkpoint
    if evidence.saves < 2:
        return None
    if not policy.asynchronous:
        remedy = "checkpoint.asynchronous false -> true"
    elif policy.every_steps is not None:
        remedy = f"checkpoint.every_steps {policy.every_steps} -> {_rarer(policy.every_steps, share)}"
    else:
        remedy = "checkpoint.auto=true, which weighs what a save costs against what a failure would"
    return Cause(share, f"saving {share:.0%} of the time: {remedy}")


def agreement(evidence: Evidence) -> Cause | None:
    """Ranks wait between steps for the others' word."""
    share = evidence.agreement_s / evidence.wall_s
    remedy = "see that cluster.network_interface is the fast network, and that no rank shares its cores"
    return Cause(share, f"the ranks wait for each other's word {share:.0%} of the time: {remedy}")


def logging(evidence: Evidence) -> Cause | None:
    """Metrics are written too often."""
    share, every = evidence.logging_s / evidence.wall_s, evidence.config.logger.every_steps
    remedy = f"logger.every_steps {every} -> {_rarer(every, share)}"
    return Cause(share, f"writing metrics {share:.0%} of the time: {remedy}")


def between_steps(evidence: Evidence) -> Cause | None:
    """What is left: Python, for steps that are shorter than what goes on around them."""
    known = (evidence.agreement_s + evidence.logging_s) / evidence.wall_s
    share = evidence.shares["between_steps"] - known
    remedy = "steps are short; a larger trainer.micro_batch_size has fewer of them"
    return Cause(share, f"{share:.0%} of the time goes between the steps: {remedy}")


CAUSES: tuple[Callable[[Evidence], Cause | None], ...] = (
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


def _own_compute(evidence: Evidence) -> str:
    shares = evidence.shares
    share = shares["forward"] + shares["backward"] + shares["optimizer"]
    once = shares["evaluation"] + shares["saving"]
    if once > share:
        return f"too short to tell: what comes once, evaluating and saving, takes {once:.0%} of the time"
    text = f"nothing holds it back: the model's own compute takes {share:.0%} of the time"
    faster = []
    if evidence.on_gpu and evidence.config.precision.kind in ("fp32", "tf32"):
        faster.append("precision=bf16")
    if evidence.on_gpu and not evidence.config.trainer.compile:
        faster.append("trainer.compile=true")
    return f"{text}; to make that faster: {', '.join(faster)}" if faster else text


def _in_steps(evidence: Evidence) -> float:
    """The share of the time that goes to steps: what a share of a step is a share of."""
    shares = evidence.shares
    return max(0.0, 1 - shares["evaluation"] - shares["saving"] - shares["between_steps"])


def _hosts(evidence: Evidence) -> int:
    return len({report.host for report in evidence.reports})


def _rarer(every: int, share: float) -> int:
    """How many steps apart something has to be so that it takes `AIM`; two digits are enough."""
    apart = every * share * (1 - AIM) / (AIM * max(1e-3, 1 - share))
    digits = int(10 ** max(0, math.floor(math.log10(max(apart, 1))) - 1))
    return max(every + 1, math.ceil(apart / digits) * digits)


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"

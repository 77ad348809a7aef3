"""The table with which the log of an attempt starts: what runs, where, and how it is cut into steps."""

from __future__ import annotations

import logging

import torch

from hpctrain.config.checkpoint import Checkpoint
from hpctrain.config.root import Config
from hpctrain.phrases import counted, listed
from hpctrain.run.bottleneck import Bottleneck
from hpctrain.run.directory import RunDirectory
from hpctrain.train.parts import Parts
from hpctrain.train.profiling.flops import flops_text

log = logging.getLogger("hpctrain.train")


def log_start(
    config: Config,
    directory: RunDirectory,
    parts: Parts,
    *,
    attempt: int,
    step: int,
    hosts: list[str],
    before: Bottleneck | None,
) -> None:
    """Log it, one line per row; rank zero's business.

    Args:
        config: of the run.
        directory: of the run.
        parts: what is trained.
        attempt: its number.
        step: completed steps from which it starts.
        hosts: of all ranks, in rank order.
        before: what an earlier attempt found out; it knows the FLOPs, which a first one counts in its first step.
    """
    world, plan, trainer = parts.world, parts.plan, config.trainer
    numbers = [parameter.numel() for parameter in parts.module.parameters()]
    trained = sum(parameter.numel() for parameter in parts.module.parameters() if parameter.requires_grad)
    names = list(dict.fromkeys(hosts))
    ranks = counted(world.size, "rank")
    loading = f"{parts.num_workers} loading processes per rank" if parts.num_workers else "fetched by the ranks"
    rows = {
        "run": f"{directory.as_typed}, attempt {attempt}, steps {step} to {parts.total_steps}",
        "task": f"{_kind(parts.task)}",
        "model": f"{_kind(parts.module)}: {sum(numbers):,} parameters, {trained:,} of them trained",
        "where": f"{ranks} on {listed(names, separator=' ')}: {_device(world.device)}, {world.cores} CPU cores each",
        "batch": f"{plan.global_batch_size:,} samples per step = {plan.micro_batch_size:,} per forward "
        f"x {plan.accumulation} accumulated x {world.size} ranks",
        "precision": config.precision.kind + (", compiled" if trainer.compile else ""),
        "data": f"{plan.num_samples:,} samples, {plan.steps_per_epoch:,} steps per epoch, "
        f"{parts.total_steps / plan.steps_per_epoch:.3g} epochs; {loading}",
        "checkpoints": _plan(config.checkpoint),
    }
    if before is not None and before.flops_per_sample is not None:
        rows["flops"] = flops_text(before.flops_per_sample, plan.global_batch_size)
    for name, text in rows.items():
        log.info("%-12s%s", name, text)


def _kind(thing: object) -> str:
    kind = type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _plan(policy: Checkpoint) -> str:
    times = []
    if policy.every_steps is not None:
        times.append(f"every {policy.every_steps} steps")
    if policy.auto:
        times.append("as often as it pays")
    elif policy.every_min is not None:
        times.append(f"every {policy.every_min:g} min")
    how = "beside training" if policy.asynchronous else "while training waits"
    kept = [f"the newest {policy.keep}"]
    if policy.keep_every is not None:
        kept.append(f"those of every {policy.keep_every} steps")
    if policy.keep_best:
        kept.append(f"the best {policy.keep_best}")
    return f"{' and '.join([*times, 'at the end'])}, written {how}; {' and '.join(kept)} are kept"

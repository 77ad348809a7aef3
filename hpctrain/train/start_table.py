"""The table at the start of an attempt's log: model, data, machines, and the batch sizes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import torch

from hpctrain.checkpoint.retention import describe_disk_space
from hpctrain.config.resources import counted_shares
from hpctrain.config.schedule import AnySchedule, schedule_of
from hpctrain.phrases import all_of, byte_size, counted, listed
from hpctrain.rank.group import ALIASES, nccl_defaults, user_nccl_variables
from hpctrain.rank.world import World
from hpctrain.run.config_change import trained_varied
from hpctrain.run.ledger import Claim
from hpctrain.run.manifest import varied_text
from hpctrain.train.model_memory import model_memory
from hpctrain.train.modes import describe_evaluation_mode
from hpctrain.train.profiling.flops import flops_text
from hpctrain.train.training import Training
from hpctrain.train.update import parameters_of

log = logging.getLogger("hpctrain.train")


def log_start(training: Training, claim: Claim, *, step: int, hosts: list[str], flops_per_sample: float | None) -> None:
    """Log the table, one line per row; for rank zero.

    Args:
        training: what is trained.
        claim: of the attempt.
        step: completed steps from which it starts.
        hosts: of all ranks, in rank order.
        flops_per_sample: as counted by an earlier attempt; None if the first step will count them.
    """
    directory, plan, share = claim.ledger.directory, training.data.plan, training.world.share
    ranks = counted(training.world.size, "rank")
    rows = {"run": f"{directory.as_typed}, attempt {claim.attempt}, steps {step} to {training.total_steps}"}
    if varied := trained_varied(directory):
        rows["varied"] = varied_text(varied)
    rows |= {
        "task": _kind(training.task),
        "model": _model(training),
        **_optimizers(training),
        **_groups(training),
        "where": f"{ranks} on {listed(dict.fromkeys(hosts), separator=' ')}: {_machine(training.world)}",
        "batch": f"{plan.global_batch_size:,} samples per step = {plan.micro_batch_size:,} per forward "
        f"x {plan.accumulation} accumulated x "
        f"{counted_shares(share.count, training.world.size // share.count)}",
        **({"loss": training.data.loss_weights.text} if training.data.loss_weights.text else {}),
        **({"mesh": mesh} if (mesh := training.network.replica.describe(hosts)) else {}),
        "memory": _memory(training),
        **_nccl(training),
        "precision": training.config.precision.kind + (", compiled" if training.config.trainer.compile else ""),
        "data": _data(training),
        "checkpoints": _checkpoint_plan(training, step),
        "disk": describe_disk_space(directory, _checkpoint_bytes(training), training.checkpoint_policy),
    }
    if in_evaluation_mode := describe_evaluation_mode(training.network.replica.model):
        rows["eval mode"] = in_evaluation_mode
    if flops_per_sample is not None:
        rows["flops"] = flops_text(flops_per_sample, plan.global_batch_size)
    for name, text in rows.items():
        log.info("%-12s%s", name, text)


def _model(training: Training) -> str:
    total = sum(parameter.numel() for parameter in training.module.parameters())
    # not by what requires a gradient: a parameter may be unfrozen later, or have a turn of its own
    trained = sum(parameter.numel() for built in training.optimizers for parameter in parameters_of(built.optimizer))
    return f"{_kind(training.module)}: {total:,} parameters, {trained:,} of them trained"


def _optimizers(training: Training) -> dict[str, str]:
    """Describe each of the named optimizers; empty if there is only one, without a name."""
    rows = {}
    for number, built in enumerate(training.optimizers):
        settings = built.settings
        if not settings.name:
            return {}
        often = "in every step" if settings.every_steps == 1 else f"every {settings.every_steps} steps"
        if settings.schedule is None:
            schedule = _schedule(training.config.schedule)
        else:
            schedule = f"{_schedule(schedule_of(f'{settings.key}.schedule', settings.schedule))} of its own"
        rows[f"optimizer {number}"] = (
            f"{settings.name}: {type(built.optimizer).__name__} minimises {settings.loss} {often}, schedule {schedule}"
        )
    return rows


def _schedule(schedule: AnySchedule) -> str:
    return str(schedule["_target_"]) if isinstance(schedule, Mapping) else schedule.kind


def _groups(training: Training) -> dict[str, str]:
    """Describe each group of parameters; nothing if there is only one, with the optimizer's own options."""
    groups = [(built, group) for built in training.optimizers for group in built.groups]
    if len(groups) == 1 and groups[0][1].entry is None:
        return {}
    options = {id(group["params"][0]): group for built in training.optimizers for group in built.optimizer.param_groups}
    rows = {}
    for number, (built, group) in enumerate(groups):
        parameters = list(group.parameters.values())
        size = f"{sum(map(torch.numel, parameters)):,} parameters in {counted(len(parameters), 'tensor')}"
        group_options = options.get(id(parameters[0]))
        how = "frozen" if group_options is None else f"lr {group_options['initial_lr']:.4g}"
        # an optimizer of the user's may take another kind of value
        if group_options is not None and isinstance(group_options.get("weight_decay"), int | float):
            how += f", weight decay {group_options['weight_decay']:g}"
        if group.entry is not None and group.entry.unfreeze_at_step is not None:
            how += f", from step {group.entry.unfreeze_at_step} on"
        elif group.entry is not None and group.entry.unfreeze_at_epoch is not None:
            how += f", from epoch {group.entry.unfreeze_at_epoch:g} on"
        owner = f"{built.settings.name}, " if built.settings.name else ""
        rows[f"group {number}"] = f"{owner}{group.label}: {size}, {how}"
    return rows


def _machine(world: World) -> str:
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    return f"{device}, {counted(world.cores, 'CPU core')} each"


def _memory(training: Training) -> str:
    """Describe what the model takes on a rank, before the activations are known."""
    memory = training.model_memory()
    kinds = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "moving average": memory.average,
    }
    shares = [f"{name} {'?' if size is None else byte_size(size)}" for name, size in kinds.items() if size != 0]
    if (parallel := training.config.parallel).cpu_offload:
        gathered = "gathered weights, whole gradients" if parallel.keep_gradients_whole else "gathered weights"
        where = f"{gathered} and activations are on the {training.world.device.type.upper()}"
        return f"{byte_size(memory.total)} of host memory per rank: {', '.join(shares)}; {where}"
    device, room = training.world.device, ""
    if device.type == "cuda":
        gpus = training.world.gpus
        room = f" of {byte_size(sum(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus))}"
    return f"{byte_size(memory.total)}{room} per rank: {', '.join(shares)}; activations come on top"


def _nccl(training: Training) -> dict[str, str]:
    """Describe the user's NCCL variables that differ from hpctrain's defaults: error handling depends on them."""
    if training.world.backend != "nccl":
        return {}
    timeout_s = training.config.health.collective_timeout_s
    usual = nccl_defaults(timeout_s)
    variables = user_nccl_variables(os.environ, timeout_s).items()
    names = {older: name for name, older in ALIASES.items()}
    texts = [f"{name}={value} (hpctrain's default: {usual[names.get(name, name)]})" for name, value in variables]
    return {"nccl": f"kept from your environment: {listed(texts)}"} if texts else {}


def _data(training: Training) -> str:
    plan, workers = training.data.plan, training.data.workers.num_workers
    fetched = f"{counted(workers, 'DataLoader worker')} per rank" if workers else "fetched by the ranks"
    return (
        f"{plan.num_samples:,} samples, {plan.steps_per_epoch:,} step{'s' * (plan.steps_per_epoch != 1)} per epoch, "
        f"{training.total_steps / plan.steps_per_epoch:.3g} epochs; {fetched}"
    )


def _kind(thing: object) -> str:
    kind = type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def _checkpoint_bytes(training: Training) -> int:
    """Estimate the bytes of a checkpoint, as if each rank wrote as much as this one."""
    memory = model_memory({training.module}, training.optimizers, training.ema)
    size = memory.weights * (1 + training.config.checkpoint.safetensors) + (memory.optimizer or 0) + memory.average
    return size * training.network.replica.num_ranks


def _checkpoint_plan(training: Training, step: int) -> str:
    policy, times = training.checkpoint_policy, []
    if policy.every_steps is not None:
        times.append(f"every {counted(policy.every_steps, 'step')}")
    if policy.auto:
        times.append("as often as it pays")
    elif policy.every_min is not None:
        times.append(f"every {policy.every_min:g} min")
    if policy.keep_best:
        total = training.total_steps
        every = training.config.trainer.eval_every_steps or training.data.plan.steps_per_epoch
        num_evaluations = total // every - step // every + bool(total % every)
        among = "the best so far" if policy.keep_best == 1 else f"among the best {policy.keep_best} so far"
        times.append(f"after each evaluation that is {among} ({num_evaluations} to come)")
    how = "in the background" if policy.asynchronous else "while training waits"
    retention = [f"the newest {policy.keep}"]
    if policy.keep_every is not None:
        retention.append(f"those of every {counted(policy.keep_every, 'step')}")
    if policy.keep_best:
        retention.append(f"the best {policy.keep_best}")
    return f"{all_of([*times, 'at the end'])}, written {how}; {' and '.join(retention)} are kept"

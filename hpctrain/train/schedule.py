"""The learning rate's factor as a closed-form function of the step."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable

from hpctrain.config.schedule import Schedule, WarmUp

ONE_CYCLE_RISE = 0.3
"""Share of the run that rises if no warm-up is configured: `pct_start` of torch's OneCycleLR."""
DECAY_SHARE = 0.1
"""Share of the run that decays if no length is configured."""

Factor = Callable[[int], float]


def learning_rate_factor(schedule: Schedule, total_steps: int, steps_per_epoch: int) -> Factor:
    """Return the factor of the optimizer's learning rates as a function of the step, counted from 0.

    - a linear rise over the warm-up, which reaches 1 at step W, its length; then
    - `constant`: 1;
    - `linear`, `cosine`: down to ``final_factor`` at the last step, linearly or along a half cosine (Loshchilov &
      Hutter, SGDR, 2017, without restarts);
    - `step`: multiplied by ``drop_factor`` at every step of ``drop_at_steps``;
    - `wsd`: 1, and over the last ``decay_steps`` linearly to ``final_factor`` (Hu et al., MiniCPM, 2024);
    - `one_cycle`: from ``start_factor`` along a half cosine to 1 at step W, then along another to ``final_factor``
      (Smith & Topin, 2018; torch's OneCycleLR without its cycle of momentum).

    Args:
        schedule: of the configuration.
        total_steps: of the run.
        steps_per_epoch: converts lengths in epochs, which are rounded to whole steps.
    """
    warmup, rise = warm_up(schedule, steps_per_epoch)
    if schedule.kind == "one_cycle":
        return _one_cycle(schedule, warmup, total_steps)
    after = _after_warmup(schedule, warmup, total_steps, steps_per_epoch)

    def factor(step: int) -> float:
        return rise(step) if step < warmup else after(step)

    return factor if warmup else after


def warm_up(schedule: WarmUp, steps_per_epoch: int) -> tuple[int, Factor]:
    """Return the steps of a linear warm-up, and its factor, which is 1 from its end on."""
    warmup = _steps(schedule.warmup_steps, schedule.warmup_epochs, steps_per_epoch)
    return warmup, lambda step: (step + 1) / (warmup + 1) if step < warmup else 1.0


def _after_warmup(schedule: Schedule, warmup: int, total_steps: int, steps_per_epoch: int) -> Factor:
    final = schedule.final_factor
    last = total_steps - 1

    def shaped(begin: int, shape: Callable[[float], float]) -> Factor:
        length = max(1, last - begin)
        return lambda step: final + (1.0 - final) * shape(min(1.0, (step - begin) / length))

    if schedule.kind == "linear":
        return shaped(warmup, _falling)
    if schedule.kind == "cosine":
        return shaped(warmup, _half_cosine)
    if schedule.kind == "wsd":
        default = max(1, round(total_steps * DECAY_SHARE))
        length = _steps(schedule.decay_steps or 0, schedule.decay_epochs, steps_per_epoch) or default
        begin = max(warmup, last - length)
        decay = shaped(begin, _falling)
        return lambda step: 1.0 if step <= begin else decay(step)
    if schedule.kind == "step":
        epochs = [round(epochs * steps_per_epoch) for epochs in schedule.drop_at_epochs]
        drops = sorted(schedule.drop_at_steps or epochs)
        return lambda step: float(schedule.drop_factor ** bisect_right(drops, step))
    return lambda _: 1.0


def _one_cycle(schedule: Schedule, warmup: int, total_steps: int) -> Factor:
    start, final = schedule.start_factor, schedule.final_factor
    peak = warmup or max(1, round(total_steps * ONE_CYCLE_RISE) - 1)
    length = max(1, total_steps - 1 - peak)

    def factor(step: int) -> float:
        if step < peak:
            return 1.0 + (start - 1.0) * _half_cosine(step / peak)
        return final + (1.0 - final) * _half_cosine(min(1.0, (step - peak) / length))

    return factor


def _steps(steps: int, epochs: float | None, steps_per_epoch: int) -> int:
    return round(epochs * steps_per_epoch) if epochs else steps


def _falling(progress: float) -> float:
    return 1.0 - progress


def _half_cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))

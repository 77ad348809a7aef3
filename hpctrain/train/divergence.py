"""The end of a run whose numbers are none any more."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from hpctrain.checkpoint.reader import load
from hpctrain.distributed.world import World
from hpctrain.errors import CheckpointError, DivergedError
from hpctrain.metrics.meter import Meter
from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.run.directory import RunDirectory
from hpctrain.train.step import TrainStep

LOSS = "train/loss"
SCALE = "train/loss_scale"


class Divergence:
    """Stops the run when its loss is NaN or infinite, or its loss scale has collapsed.

    It looks at what is read from the device anyway: the means that are logged, and before a save the sums so far, so
    that no checkpoint is written of a loss that is no number. In fp16 a loss that overflowed harms nothing as long as
    its update was skipped: then the scale decides.

    Args:
        directory: of the run, for the last good checkpoint.
        world: the ranks; they all see the same numbers.
        train_step: tells of skipped updates.
        meter: has the loss.
        settle: waits for a checkpoint that is still being written.
        min_loss_scale: below it the scale has collapsed.
        start_step: steps that earlier attempts completed.
    """

    def __init__(
        self,
        directory: RunDirectory,
        world: World,
        train_step: TrainStep,
        meter: Meter,
        *,
        settle: Callable[[], object],
        min_loss_scale: float,
        start_step: int,
    ) -> None:
        self._directory, self._world, self._train_step, self._meter = directory, world, train_step, meter
        self._settle, self._min_loss_scale = settle, min_loss_scale
        self._since, self._skipped = start_step, train_step.update.num_skipped

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Look at what is logged; collective.

        Raises:
            DivergedError: names the steps and the last good checkpoint.
        """
        self._require_finite(step, values[LOSS])
        if values.get(SCALE, math.inf) < self._min_loss_scale:
            self._stop(
                f"the loss scale fell to {values[SCALE]:g} by step {step}, below "
                f"precision.min_loss_scale={self._min_loss_scale:g}: gradients overflow at any scale"
            )
        self._since, self._skipped = step, self._train_step.update.num_skipped

    def check_before_save(self, step: int) -> None:
        """Look at the loss since it was last logged; collective.

        Raises:
            DivergedError: names the steps and the last good checkpoint.
        """
        total, count = self._meter.state()[LOSS]
        if count:
            self._require_finite(step, total / count)
            self._since = step

    def _require_finite(self, step: int, loss: float) -> None:
        if not math.isfinite(loss) and self._train_step.update.num_skipped == self._skipped:
            first = self._since + 1
            where = f"at step {step}" if first >= step else f"between steps {first} and {step}"
            self._stop(f"the training loss turned {'NaN' if math.isnan(loss) else 'infinite'} {where}")

    def _stop(self, what: str) -> None:
        text = ""
        if self._world.is_rank_zero:
            with suppress(CheckpointError):
                self._settle()
            text = f"{what}; {_last_good(self._directory)}"
        raise DivergedError(self._world.broadcast(text))


def _last_good(directory: RunDirectory) -> str:
    bad: list[int] = []
    for info in reversed(list_checkpoints(directory)):
        path = directory.checkpoint(info.step)
        if info.intact and _is_finite(path):
            newer = f" (of the newer ones, {', '.join(map(str, bad))}, none is)" if bad else ""
            return (
                f"the last good checkpoint is of step {info.step}{newer}: begin a new run with init_from={path}, "
                "and a lower optimizer.lr, a warm-up or trainer.clip_grad_norm"
            )
        bad.append(info.step)
    return "there is no good checkpoint: try a lower optimizer.lr, a warm-up or trainer.clip_grad_norm"


def _is_finite(path: Path) -> bool:
    try:
        weights = load(path).model
    except CheckpointError:
        return False
    return all(bool(torch.isfinite(value).all()) for value in weights.values() if isinstance(value, Tensor))

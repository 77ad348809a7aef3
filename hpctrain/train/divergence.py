"""Stop a run whose loss or weights are NaN or infinite, or whose loss scale has collapsed."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from hpctrain.checkpoint.read import load
from hpctrain.checkpoint.saver import CheckpointSaver
from hpctrain.checkpoint.stored_tensor import whole_tensors
from hpctrain.errors import CheckpointError, DivergedError
from hpctrain.parallel.local_part import local_part
from hpctrain.phrases import SHOWN, listed
from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.run.directory import RunDirectory
from hpctrain.train.step import Turn
from hpctrain.train.training import Training


class Divergence:
    """Raises when training has diverged, and names the last good checkpoint.

    It reads values that training copies from the device anyway: the logged means, and before a save the sums so far,
    so that no checkpoint is written after the loss has become NaN. In fp16 a loss that overflowed does no harm if its
    update was skipped; there the scale decides.

    A finite loss can have NaN gradients, which the next loss shows. After the last step there is no next loss, so the
    weights themselves are checked; also whenever a gradient norm that was measured isn't finite.

    Args:
        training: what is trained.
        directory: of the run.
        saver: may still be writing the last good checkpoint.
        start_step: steps that earlier attempts completed.
    """

    def __init__(self, training: Training, directory: RunDirectory, saver: CheckpointSaver, start_step: int) -> None:
        self._training = training
        self._directory = directory
        self._saver = saver
        self._min_loss_scale = training.config.precision.min_loss_scale
        self._finite_at = start_step
        self._num_skipped = self._skipped_now()

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Check the values that are logged after ``step`` steps; collective.

        Raises:
            DivergedError: names the steps and the last good checkpoint.
        """
        self._check(step, values)
        self._num_skipped = self._skipped_now()

    def check_before_save(self, step: int, *, ends_run: bool) -> None:
        """Check the loss since it was last logged, and at the end the weights; collective.

        Args:
            step: completed steps.
            ends_run: whether this is the last checkpoint of the run.

        Raises:
            DivergedError: names the steps and the last good checkpoint.
        """
        sums = self._training.meter.state()
        self._check(step, {name: total / count for name, (total, count) in sums.items() if count})
        if ends_run:
            self.require_finite_weights(step)

    def require_finite_weights(self, step: int) -> None:
        """Check the trained parameters, and their moving average; collective, and waits for the device.

        Frozen parameters and buffers may hold any number.

        Raises:
            DivergedError: names the parameters and the last good checkpoint.
        """
        tensors = dict(self._trained)
        if self._training.ema is not None:
            tensors |= {f"{name} (averaged)": average for name, average in self._training.ema.averages.items()}
        # parameters on `meta` belong to other ranks
        bad = [name for name, tensor in tensors.items() if not tensor.is_meta and not _is_finite(local_part(tensor))]
        if names := self._training.world.union(bad[:SHOWN]):
            self._fail(f"trained weights are NaN or infinite after step {step}: {listed(names)}")

    def _check(self, step: int, values: Mapping[str, float]) -> None:
        for turn in self._training.step.turns:
            if turn.loss.log_name in values:
                self._require_finite(step, turn, values[turn.loss.log_name])
            scale = values.get(turn.loss.scale_name, math.inf)
            if scale < self._min_loss_scale:
                self._fail(
                    f"the loss scale{turn.loss.suffix} fell to {scale:g} by step {step}, below "
                    f"precision.min_loss_scale={self._min_loss_scale:g}: gradients overflow at any scale"
                )
        # clipping by an infinite norm leaves the weights finite
        if not all(math.isfinite(values.get(update.norm_name, 0.0)) for update in self._training.step.updates):
            self.require_finite_weights(step)
        self._finite_at = step

    @property
    def _trained(self) -> dict[str, Tensor]:
        groups = [group for built in self._training.optimizers for group in built.groups if not group.frozen]
        return {name: parameter for group in groups for name, parameter in group.parameters.items()}

    def _skipped_now(self) -> dict[str, int]:
        return {turn.loss.name: turn.update.num_skipped for turn in self._training.step.turns}

    def _require_finite(self, step: int, turn: Turn, loss: float) -> None:
        if not math.isfinite(loss) and turn.update.num_skipped == self._num_skipped[turn.loss.name]:
            first = self._finite_at + 1
            where = f"at step {step}" if first >= step else f"between steps {first} and {step}"
            self._fail(
                f"the training loss{turn.loss.suffix} turned {'NaN' if math.isnan(loss) else 'infinite'} {where}"
            )

    def _fail(self, what: str) -> NoReturn:
        text = ""
        world = self._training.world
        if world.is_rank_zero:
            with suppress(CheckpointError):
                self._saver.finish()
            text = f"{what}; {_last_good(self._directory, self._trained.keys())}"
        raise DivergedError(world.broadcast(text))


def _last_good(directory: RunDirectory, trained: Container[str]) -> str:
    bad: list[int] = []
    for info in reversed(list_checkpoints(directory, verify=False)):
        path = directory.checkpoint(info.step)
        if _is_good(path, trained):
            newer = f" (of the newer ones, {', '.join(map(str, bad))}, none is)" if bad else ""
            return (
                f"the last good checkpoint is of step {info.step}{newer}: start a new run with init_from={path}, "
                "and a lower optimizer.lr, a warm-up or trainer.clip_grad_norm"
            )
        bad.append(info.step)
    return "there is no good checkpoint: try a lower optimizer.lr, a warm-up or trainer.clip_grad_norm"


def _is_good(path: Path, trained: Container[str]) -> bool:
    try:
        weights = load(path).model
    except CheckpointError:
        return False
    # one after the other: no process may hold all of a checkpoint of several ranks
    tensors = (whole_tensors(value) for name, value in weights.items() if name in trained)
    return all(_is_finite(value) for value in tensors if isinstance(value, Tensor))


def _is_finite(tensor: Tensor) -> bool:
    # isfinite isn't implemented for all of torch's 1-byte types
    wide = tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
    return bool(torch.isfinite(wide).all())

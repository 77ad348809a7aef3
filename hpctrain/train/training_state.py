"""The state of a training in checkpoints: one list of parts, saved and restored in its order."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from hpctrain.checkpoint.best import Best
from hpctrain.checkpoint.restore import restore_weights
from hpctrain.checkpoint.rng import GlobalGenerators
from hpctrain.checkpoint.state import CHANGED_BUFFERS, Stateful, buffer_kinds, changed_buffers
from hpctrain.config.optimizer import SHARED_KEYS
from hpctrain.config.root import config_digest
from hpctrain.errors import TaskError
from hpctrain.metrics.meter import Meter
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.phrases import counted, listed
from hpctrain.train.modes import Modes
from hpctrain.train.optimizers import drop_absent_states
from hpctrain.train.step import TrainStep
from hpctrain.train.training import Training
from hpctrain.train.update import Update

ABSENT: Mapping[str, Any] = {"ema": {}, "best": {}}
"""Empty states of the parts that a training may lack: every checkpoint has their keys."""

log = logging.getLogger("hpctrain.train")


def training_state(training: Training, best: Best | None, weights: WeightsState) -> tuple[Stateful, ...]:
    """List all state that determines the rest of a run between two steps, in the order in which it is restored.

    This is the only list of them: a part that saving or resuming left out would be lost without an error. Its order is
    also that of the collectives. A part may have several keys, as checkpoints of earlier versions do. `Head` isn't in
    it, since it describes the save as a whole, and is read without torch.

    Args:
        training: whose state it is.
        best: the best evaluations; None if the run doesn't rank them.
        weights: of the training.
    """
    world = training.world
    return (
        # first: the code of a task that restores its own state may ask where the training is
        PositionState(training),
        weights,
        # after the optimizers, whose rates they set
        UpdatesState(training.step),
        MeterState(training.meter, world),
        *(() if training.ema is None else (training.ema,)),
        *(() if best is None else (best,)),
        Modes(training.network.replica.model),
        training.task_state,
        training.ending,
        training.callbacks,
        training.data.stream_state,
        training.data.loss_weights,
        # last: whatever restores its state before may draw random numbers. So may the replicas that are built after the
        # restore, for which `Checkpointing.resume` sets the streams back
        GlobalGenerators(world, training.config.seed),
    )


class PositionState(Stateful):
    """The position of a run, and the facts that must not change for an exact resume.

    `Head` saves the step, the world size and the digest of the configuration, which `load_state` also reads.

    Args:
        training: whose position it is.
    """

    def __init__(self, training: Training) -> None:
        self._training = training

    def state(self) -> dict[str, Any]:
        """Return the number of samples, and the degrees of the mesh that aren't 1."""
        return {"num_samples": self._training.data.num_samples, **self._training.world.share.degrees}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Continue after the saved step; on rank zero, warn of what makes the run inexact."""
        world, position, step = self._training.world, self._training.position, saved["step"]
        position.step = step
        if not world.is_rank_zero:
            return
        if saved["config_digest"] != config_digest(self._training.config):
            log.warning("keys that affect the weights have changed since step %d: the run is not exact", step)
        if saved["world_size"] != world.size:
            log.warning(
                "%s at step %d from a checkpoint of %s: the samples of each step are the same, but the order of sums, "
                "batch norm and dropout differ, so the run is no longer exact",
                f"{counted(world.size, 'rank')} resume{'s' * (world.size == 1)}",
                step,
                counted(saved["world_size"], "rank"),
            )
        # earlier versions didn't save it
        before, now = saved.get("num_samples"), self._training.data.num_samples
        if before != now and None not in (before, now):
            log.warning(
                "the training data had %d samples at step %d, and have %d now: order and epochs differ from here on, "
                "and the run is not exact; if you didn't intend that, stop the run and restore the data",
                before,
                step,
                now,
            )


class WeightsState(Stateful):
    """The model, the optimizers over its parameters, and the loss scales.

    `state` returns these objects themselves; the save copies their tensors, into memory that is kept from save to save,
    or each rank of a mesh its parts. torch's `get_state_dict` would rename the optimizers' keys, and needs a group.

    Args:
        training: whose weights they are.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._built_buffers = buffer_kinds(training.model)

    def state(self) -> dict[str, Any]:
        """Return the model, the optimizers, the scalers, the optimizers' options, and the names of changed buffers."""
        step, buffers = self._training.step, self._changed_buffers()
        return {
            "model": self._training.module,
            "optimizers": _optimizers_of(step),
            "scalers": _scalers_of(step),
            "optimizer": self._training.config.optimizer,
            **({CHANGED_BUFFERS: buffers} if buffers else {}),
        }

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Restore the tensors, and the options of optimizers that the configuration hasn't changed since.

        Raises:
            CheckpointError: the model or an optimizer differs from what was saved.
        """
        step, current_options = self._training.step, self._training.config.optimizer
        optimizers, saved_options = _optimizers_of(step), saved.get("optimizer", {})
        changed = {
            name: _changed(_options(saved_options, name), _options(current_options, name)) for name in optimizers
        }
        restore_weights(saved, self._training.module, optimizers, _scalers_of(step), changed_options=changed)
        for update in step.updates:
            drop_absent_states(update.optimizer)

    def require_constant_buffers(self) -> None:
        """Refuse buffers that training adds, removes or gives another shape, where a checkpoint can't hold them.

        Raises:
            TaskError: the model has such a buffer, and its ranks share it, or compute with a half-precision copy.
        """
        training = self._training
        has_copy = training.model is not training.module
        if (has_copy or training.network.replica.is_shared) and (names := self._changed_buffers()):
            where = f"with precision={training.config.precision.kind}" if has_copy else "of a model on several ranks"
            remedy = "another precision" if has_copy else "parallel=ddp"
            raise TaskError(
                f"training changes the shape or dtype of {listed(names)}, which checkpoints {where} can't hold: give "
                f"these buffers their largest size in build_model, or use {remedy}"
            )

    def _changed_buffers(self) -> list[str]:
        return changed_buffers(self._built_buffers, buffer_kinds(self._training.model))


class MeterState(Stateful):
    """The sums in a meter since the last record: over all ranks, and on each one.

    Args:
        meter: of this rank.
        world: the ranks.
    """

    is_collective: ClassVar[bool] = True

    def __init__(self, meter: Meter, world: TrainingWorld) -> None:
        self._meter = meter
        self._world = world

    def state(self) -> dict[str, Any]:
        """Return the sums over all ranks, and at rank zero those of each rank; collective."""
        return {"meter_by_rank": self._world.gather(self._meter.own_state()), "meter": self._meter.state()}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Continue each rank's sums; on another number of ranks, rank zero has those of all."""
        by_rank = saved.get("meter_by_rank", ())
        own_sums = by_rank[self._world.rank] if len(by_rank) == self._world.size else None
        self._meter.load_state(saved.get("meter", {}), rank=self._world.rank, own_state=own_sums)


class UpdatesState(Stateful):
    """The schedules of the optimizers, and the numbers of skipped updates; of several optimizers by name.

    Args:
        step: has the updates.
    """

    def __init__(self, step: TrainStep) -> None:
        self._step = step

    def state(self) -> dict[str, Any]:
        """Return the states of the schedules and the numbers; of several optimizers also their last learning rates."""
        updates = _by_name(self._step)
        schedules = {name: update.learning_rate.state_dict() for name, update in updates.items()}
        skipped = {name: update.num_skipped for name, update in updates.items()}
        if "" in updates:
            return {"schedule": schedules[""], "skipped_updates": skipped[""]}
        # logged in every record, also before the next update of an optimizer that doesn't step each time
        rates = {name: update.learning_rate.current for name, update in updates.items()}
        return {"schedule": schedules, "skipped_updates": skipped, "rates": rates}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Continue the schedules, once the optimizers are restored."""
        updates = _by_name(self._step)
        schedules, skipped, rates = saved.get("schedule", {}), saved.get("skipped_updates", 0), saved.get("rates", {})
        if "" in updates:
            schedules, skipped = {"": schedules}, {"": skipped}
        for name, update in updates.items():
            update.learning_rate.load_state_dict(schedules.get(name, {}))
            update.num_skipped = int(skipped.get(name, 0))
            if name in rates:
                update.learning_rate.restore_current(rates[name])


def _by_name(step: TrainStep) -> dict[str, Update]:
    return {update.name: update for update in step.updates}


def _optimizers_of(step: TrainStep) -> dict[str, torch.optim.Optimizer]:
    return {update.name: update.optimizer for update in step.updates}


def _scalers_of(step: TrainStep) -> dict[str, torch.amp.GradScaler]:
    """Return the scalers of the turns by the names of their losses; that of the only turn has the name ''."""
    is_single = len(step.turns) == 1
    scalers = {"" if is_single else turn.loss.name: turn.update.scaler for turn in step.turns}
    return {name: scaler for name, scaler in scalers.items() if scaler is not None}


def _options(node: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the options of an optimizer; of one that has a name, with those that it shares with the others."""
    if not name:
        return node
    shared = {key: node[key] for key in SHARED_KEYS if node.get(key) is not None}
    return {**shared, **node.get("named", {}).get(name, {})}


def _changed(saved_options: Mapping[str, Any], current_options: Mapping[str, Any]) -> set[str]:
    """Return the options of an optimizer whose values differ from those of the checkpoint."""
    changed = {key for key in (*saved_options, *current_options) if saved_options.get(key) != current_options.get(key)}
    # an option of a group replaces the optimizer's own there, and both are in the checkpoint
    groups = [entry for node in (saved_options, current_options) for entry in node.get("groups") or ()]
    return changed.union(*groups) if "groups" in changed else changed

"""The state of updates in checkpoints: of the only optimizer, or of several by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hpctrain.checkpoint.read import LoadedCheckpoint
from hpctrain.config.named_optimizers import SHARED_KEYS
from hpctrain.train.optimizers import drop_absent_states
from hpctrain.train.step import TrainStep
from hpctrain.train.update import Update


def optimizers_of(step: TrainStep) -> torch.optim.Optimizer | dict[str, torch.optim.Optimizer]:
    """Return the optimizer without a name, or all by name."""
    named = _by_name(step)
    return named[""].optimizer if "" in named else {name: update.optimizer for name, update in named.items()}


def scalers_of(step: TrainStep) -> torch.amp.GradScaler | dict[str, torch.amp.GradScaler] | None:
    """Return the scaler of the only turn, or those of all turns by name; None if there is none."""
    if len(step.turns) == 1:
        return step.turns[0].update.scaler
    return {turn.loss.name: turn.update.scaler for turn in step.turns if turn.update.scaler is not None} or None


def progress_of(step: TrainStep) -> dict[str, Any]:
    """Return what else is saved of the updates: states of schedules, and numbers of skipped updates."""
    named = _by_name(step)
    schedules = {name: update.learning_rate.state_dict() for name, update in named.items()}
    skipped = {name: update.num_skipped for name, update in named.items()}
    if "" in named:
        return {"schedule": schedules[""], "skipped_updates": skipped[""]}
    # logged in every record, also before the next update of an optimizer that doesn't step each time
    rates = {name: update.learning_rate.current for name, update in named.items()}
    return {"schedule": schedules, "skipped_updates": skipped, "rates": rates}


def restore_updates(step: TrainStep, model: nn.Module, found: LoadedCheckpoint, node: Mapping[str, Any]) -> None:
    """Restore the model, and the state of all updates.

    Args:
        step: whose updates are restored.
        model: over whose parameters the optimizers are.
        found: the checkpoint.
        node: the group `optimizer` of the configuration.

    Raises:
        CheckpointError: the model or an optimizer differs from what was saved.
    """
    named = _by_name(step)
    before = found.extra.get("optimizer", {})
    schedules, skipped = found.extra.get("schedule", {}), found.extra.get("skipped_updates", 0)
    if "" in named:
        found.restore(model, optimizers_of(step), scalers_of(step), changed=_changed(before, node))
        schedules, skipped = {"": schedules}, {"": skipped}
    else:
        changed = {name: _changed(_own(before, name), _own(node, name)) for name in named}
        found.restore(model, optimizers_of(step), scalers_of(step), changed=changed)
    for name, update in named.items():
        drop_absent_states(update.optimizer)
        update.learning_rate.load_state_dict(schedules.get(name, {}))
        update.num_skipped = int(skipped.get(name, 0))
        update.learning_rate.current = found.extra.get("rates", {}).get(name, update.learning_rate.current)


def _by_name(step: TrainStep) -> dict[str, Update]:
    return {update.name: update for update in step.updates}


def _own(node: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the keys of one optimizer, with those that it shares with the others."""
    shared = {key: node[key] for key in SHARED_KEYS if node.get(key) is not None}
    return {**shared, **node.get("named", {}).get(name, {})}


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Return the options of an optimizer whose values differ from those of the checkpoint."""
    changed = {key for key in (*before, *now) if before.get(key) != now.get(key)}
    # an option of a group replaces the optimizer's own there, and both are in the checkpoint
    groups = [entry for node in (before, now) for entry in node.get("groups") or ()]
    return changed.union(*groups) if "groups" in changed else changed
